"""The TCP connection of nats-py's client, which can be ended without sending what is left."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from nats.aio.transport import TcpTransport

from airflow_provider_jetstream.jetstream.client.server_info import parse_server_info
from airflow_provider_jetstream.jetstream.client.unsent import drop_when_closed, limit_send_time
from airflow_provider_jetstream.jetstream.errors import WireError

if TYPE_CHECKING:
    from asyncio.trsock import TransportSocket
    from urllib.parse import ParseResult


class AbortableTransport(TcpTransport):
    """A TCP connection, with TLS where it was asked for.

    nats-py closes a connection that it gives up by sending the rest first, however long that takes.

    :param send_seconds: how long bytes may be on their way
    :ivar generation: counts the connections to a server
    """

    def __init__(self, send_seconds: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._send_seconds = send_seconds
        self._socket: TransportSocket | None = None
        self.generation = 0

    def __bool__(self) -> bool:
        """Be true before the first connection as well: the client would replace it by a transport of its own."""
        return True

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        """Connect to a server, once more after a loss."""
        self.generation += 1
        await super().connect(uri, buffer_size, connect_timeout)
        if self._io_writer is not None:
            # TLS is spoken over the same socket.
            self._socket = self._io_writer.get_extra_info("socket")
            limit_send_time(self._socket, self._send_seconds)

    async def wait_closed(self) -> None:
        """Wait for the end of the connection, as several tasks do: cancelling one of them leaves the others waiting."""
        await asyncio.shield(super().wait_closed())  # type: ignore[no-untyped-call]

    def writelines(self, payload: list[bytes]) -> None:
        """Send frames in one piece: over TLS each piece is a record of its own."""
        self.write(payload[0] if len(payload) == 1 else b"".join(payload))  # type: ignore[no-untyped-call]

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
