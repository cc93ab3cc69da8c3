"""One TCP connection to a server, with TLS where it was asked for: bytes to frames, within slices of time."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.client.unsent import drop_when_closed
from airflow_provider_jetstream.jetstream.client.wire import FrameReader
from airflow_provider_jetstream.jetstream.errors import WireError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

log = logging.getLogger(__name__)

_MOST_SAID: Final = 16_384
# A read brings hundreds of messages, whose callbacks together would hold the event loop for twenty milliseconds: other
# tasks run after some messages that took so many seconds of CPU time.
_AT_ONCE: Final = 4
_SLICE_SECONDS: Final = 0.004
# Bytes that may be written and not yet taken by the operating system.
MOST_UNSENT: Final = 2 << 20


class ServerLink(asyncio.Protocol):
    """One TCP connection to a server, with TLS where it was asked for.

    :param on_message: gets each message: subscription, subject, reply, headers and body
    :param on_control: gets each control line once the handshake is over
    :param on_lost: is called at the end of the connection
    :param stats: what it counts in ``in_msgs`` and ``in_bytes``
    :ivar is_open: whether the handshake is over
    """

    def __init__(
        self,
        on_message: Callable[[bytes, bytes, bytes, bytes | None, bytes], None],
        on_control: Callable[[bytes, bytes], None],
        on_lost: Callable[[ServerLink, Exception], None],
        stats: dict[str, int],
    ) -> None:
        self.reader = FrameReader()
        self._stats = stats
        self.is_open = False
        self.lines: deque[tuple[bytes, bytes]] = deque()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_message = on_message
        self._on_control = on_control
        self._on_lost = on_lost
        self._arrived = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._lost: Exception | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101
        self._transport = transport
        transport.set_write_buffer_limits(MOST_UNSENT)

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end of the connection."""
        self._lost = self._lost or exc or ConnectionError("the server closed the connection")
        self._arrived.set()
        self._writable.set()
        if not self.ended.done():
            self.ended.set_result(None)
        self._on_lost(self, self._lost)

    def pause_writing(self) -> None:
        """Note that much is written that the operating system hasn't taken."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Note that there is room again."""
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived."""
        self.reader.feed(data)
        if self._read() and self._transport:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._read_on)

    def _read_on(self) -> None:
        if self._lost is not None or self._transport is None:
            return
        if self._read():
            asyncio.get_running_loop().call_soon(self._read_on)
        elif not self._transport.is_closing():
            self._transport.resume_reading()

    def _read(self) -> bool:
        """Hand over what has arrived, and return whether there is more, which other tasks come before."""
        began = time.thread_time()
        try:
            while self.reader.read(self._on_message, self._take_line, _AT_ONCE):
                if time.thread_time() - began >= _SLICE_SECONDS:
                    return True
        except WireError as error:
            log.warning("The connection is dropped: %s", error)
            self.fail(error)
        finally:
            self._stats["in_msgs"] += self.reader.messages
            self._stats["in_bytes"] += self.reader.size
            self.reader.messages = self.reader.size = 0
        return False

    def _take_line(self, op: bytes, line: bytes) -> None:
        if self.is_open:
            self._on_control(op, line)
        else:
            self.lines.append((op, line))
            self._arrived.set()

    async def next_line(self) -> tuple[bytes, bytes]:
        """Return the name of the next line of the handshake, and the line.

        :raises ConnectionError: the server refuses the connection
        """
        while not self.lines:
            if self._lost is not None:
                raise self._lost
            self._arrived.clear()
            await self._arrived.wait()
        op, line = self.lines.popleft()
        if op == b"-ERR":
            raise ConnectionError(said(line))
        return op, line

    async def start_tls(self, context: ssl.SSLContext, name: str) -> None:
        """Encrypt the connection."""
        if self._transport is None or self._lost is not None:
            raise self._lost or ConnectionError("the server closed the connection")
        encrypted = await asyncio.get_running_loop().start_tls(self._transport, self, context, server_hostname=name)
        if encrypted is None:
            raise self._lost or ConnectionError("the server closed the connection")
        self.connection_made(encrypted)

    def write(self, data: bytes) -> None:
        """Send bytes."""
        if self._transport is None or self._lost is not None:
            return
        self._transport.write(data)
        if not self.is_open and self._transport.is_closing():
            # The server has closed the connection, and asyncio is about to close the socket unread.
            with suppress(OSError, WireError), self._transport.get_extra_info("socket").dup() as unread:
                self.reader.feed(unread.recv(_MOST_SAID, socket.MSG_DONTWAIT))
                self._read()

    @property
    def unsent(self) -> int:
        """How many bytes the operating system hasn't taken."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    async def wait_for_room(self) -> None:
        """Wait while much is written that the operating system hasn't taken."""
        await self._writable.wait()

    def fail(self, error: Exception) -> None:
        """End the connection for a reason."""
        self._lost = self._lost or error
        self.abort()

    def close(self) -> None:
        """End the connection once all is sent."""
        if self._transport:
            self._transport.close()

    def abort(self) -> None:
        """End the connection, and drop what isn't sent."""
        if self._transport:
            if (connected := self._transport.get_extra_info("socket")) is not None:
                with suppress(OSError):
                    drop_when_closed(connected)
            self._transport.abort()


def said(line: bytes) -> str:
    """Return the text of an ``-ERR``."""
    return line.partition(b" ")[2].decode(errors="replace").strip().strip("'")
