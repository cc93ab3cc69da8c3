"""The TCP connection of nats-py's client, which can be ended without sending what is left."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from nats.aio.transport import TcpTransport

from airflow_provider_jetstream.jetstream.client.denials import last_report_of
from airflow_provider_jetstream.jetstream.client.server_info import parse_server_info
from airflow_provider_jetstream.jetstream.client.unsent import drop_when_closed, limit_send_time
from airflow_provider_jetstream.jetstream.errors import WireError

if TYPE_CHECKING:
    from asyncio.trsock import TransportSocket
    from collections.abc import Iterable
    from typing import SupportsIndex
    from urllib.parse import ParseResult


_MOST_SAID: Final = 16_384


class HandshakeReader(asyncio.StreamReader):
    """A reader that keeps what the server says until the handshake is over, whoever reads it.

    :ivar said: what has come; ``None`` once the handshake is over
    """

    said: bytearray | None = None

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        """Take what has arrived."""
        if self.said is not None and len(self.said) < _MOST_SAID:
            self.said.extend(data)
        super().feed_data(data)


class AbortableTransport(TcpTransport):
    """A TCP connection, with TLS where it was asked for.

    nats-py closes a connection that it gives up by sending the rest first, however long that takes. And it raises what
    became of the connection, where the server has said why and closed it before the client wrote.

    :param send_seconds: how long bytes may be on their way
    :ivar generation: counts the connections to a server
    """

    def __init__(self, send_seconds: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._send_seconds = send_seconds
        self._socket: TransportSocket | None = None
        self._reader: HandshakeReader | None = None
        self.generation = 0

    def __bool__(self) -> bool:
        """Be true before the first connection as well: the client would replace it by a transport of its own."""
        return True

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        """Connect to a server, once more after a loss."""
        self.generation += 1
        loop = asyncio.get_running_loop()
        reader = self._reader = HandshakeReader(limit=buffer_size, loop=loop)
        reader.said = bytearray()
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        async with asyncio.timeout(connect_timeout):
            transport, _ = await loop.create_connection(lambda: protocol, str(uri.hostname), uri.port or 0)
        self._bare_io_reader = self._io_reader = reader
        self._bare_io_writer = self._io_writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        # TLS is spoken over the same socket.
        self._socket = transport.get_extra_info("socket")
        limit_send_time(self._socket, self._send_seconds)

    def write(self, payload: bytes) -> None:
        """Send bytes."""
        super().write(payload)  # type: ignore[no-untyped-call]
        reader, writer, connected = self._reader, self._io_writer, self._socket
        if reader and reader.said is not None and writer and connected and writer.transport.is_closing():
            # The server has closed the connection, and asyncio is about to close the socket unread.
            with suppress(OSError), connected.dup() as unread:
                reader.said += unread.recv(_MOST_SAID, socket.MSG_DONTWAIT)

    def end_handshake(self) -> str:
        """Note that the handshake is over; return the text of the ``-ERR`` that came during it, or an empty one."""
        if self._reader is None or self._reader.said is None:
            return ""
        said, self._reader.said = bytes(self._reader.said), None
        return last_report_of(said)

    async def wait_closed(self) -> None:
        """Wait for the end of the connection, as several tasks do: cancelling one of them leaves the others waiting."""
        await asyncio.shield(super().wait_closed())  # type: ignore[no-untyped-call]

    def writelines(self, payload: list[bytes]) -> None:
        """Send frames in one piece: over TLS each piece is a record of its own."""
        self.write(payload[0] if len(payload) == 1 else b"".join(payload))

    async def readline(self) -> bytes:
        """Read a line of the handshake; the client believes an INFO without a look at it.

        :raises WireError: no nats-server has sent this
        """
        try:
            line: bytes = await super().readline()  # type: ignore[no-untyped-call]
        except ValueError:
            raise WireError("expected a line of the NATS protocol, found one without an end") from None
        if b"INFO" in line:
            parse_server_info(line.partition(b"INFO ")[2])
        return line

    def abort(self) -> None:
        """End the connection and drop all bytes that aren't sent."""
        if self._io_writer is not None and self._socket is not None:
            with suppress(OSError):
                drop_when_closed(self._socket)
            self._io_writer.transport.abort()
