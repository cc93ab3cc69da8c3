"""A TCP proxy in front of a server that begins to misbehave after some chunks of what the server sent."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from testbed.ports import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

Fault: TypeAlias = Literal["black hole", "answers lost", "a byte now and then", "garbage", "cut"]
FAULTS: tuple[Fault, ...] = get_args(Fault)

_CHUNK = 65_536
_SECONDS_PER_BYTE = 0.5


class FaultyProxy:
    """Forwards the bytes of clients and the server until the fault begins, which then stays for all connections.

    :param port: the server's
    :param after: how many chunks of the server are forwarded before
    :param begin: is called when the fault begins
    """

    def __init__(self, port: int, fault: Fault | None, after: int, begin: Callable[[], object] = lambda: None) -> None:
        self._server_port = port
        self._fault = fault
        self._left = after
        self._begin = begin
        self.began = False
        self.port = 0

    @property
    def url(self) -> str:
        """The address for clients."""
        return f"nats://{LOOPBACK}:{self.port}"

    def _pass_one(self) -> bool:
        """Return whether one more chunk of the server is forwarded."""
        self._left -= 1
        if self._left < 0 and not self.began:
            self.began = True
            self._begin()
        return self._left >= 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward the bytes of one client and the server."""
        with suppress(OSError):
            from_server, to_server = await asyncio.open_connection(LOOPBACK, self._server_port)
            tasks = [
                asyncio.create_task(self._to_server(reader, to_server)),
                asyncio.create_task(self._to_client(from_server, writer)),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            to_server.close()
        writer.close()

    async def _to_server(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(_CHUNK):
            if self.began and self._fault == "black hole":
                continue
            writer.write(chunk)
            await writer.drain()

    async def _to_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(_CHUNK):
            if self._pass_one() or self._fault is None:
                writer.write(chunk)
            elif self._fault == "a byte now and then":
                for number in range(len(chunk)):
                    writer.write(chunk[number : number + 1])
                    await writer.drain()
                    await asyncio.sleep(_SECONDS_PER_BYTE)
            elif self._fault == "garbage":
                writer.write(os.urandom(len(chunk)) + b"\r\n" + os.urandom(_CHUNK))
            elif self._fault == "cut":
                return
            await writer.drain()


@asynccontextmanager
async def faulty_proxy(
    port: int, fault: Fault | None, after: int, begin: Callable[[], object] = lambda: None
) -> AsyncIterator[FaultyProxy]:
    """Open a proxy to the server on ``port``."""
    proxy = FaultyProxy(port, fault, after, begin)
    server = await asyncio.start_server(proxy.serve, LOOPBACK, 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
