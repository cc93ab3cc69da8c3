"""A TCP proxy between clients and a server that can hold bytes back, and cut and refuse connections."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from testbed.ports import LOOPBACK

_CHUNK = 65_536


class TcpProxy:
    """Forwards bytes in both directions while it isn't paused; ``port`` is the server's port."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._forwarding = asyncio.Event()
        self._forwarding.set()
        self._clients: set[asyncio.StreamWriter] = set()
        self._refuses = False
        self._generation = 0
        self._needle = b""
        self.found = asyncio.Event()
        self.port = 0

    @property
    def url(self) -> str:
        """The address for clients."""
        return f"nats://{LOOPBACK}:{self.port}"

    def pause(self) -> None:
        """Hold back all bytes from now on; no connection is closed."""
        self._forwarding.clear()

    def resume(self) -> None:
        """Forward what was held back, and all that follows."""
        self._forwarding.set()

    def pause_at(self, text: bytes) -> None:
        """Hold back all bytes from the moment on at which a client sends this text; ``found`` is set then."""
        self._needle = text
        self.found.clear()

    def cut(self) -> None:
        """Close all connections, and refuse new ones."""
        self._refuses = True
        for writer in self._clients:
            writer.transport.abort()

    def drop(self) -> None:
        """Forget the bytes that are held back."""
        self._generation += 1
        self.resume()

    def mend(self) -> None:
        """Accept connections again."""
        self._refuses = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward the bytes of one client and the server."""
        if self._refuses:
            writer.transport.abort()
            return
        self._clients.add(writer)
        with suppress(OSError):
            from_server, to_server = await asyncio.open_connection(LOOPBACK, self._server_port)
            tasks = [
                asyncio.create_task(self._pass_on(reader, to_server, from_client=True)),
                asyncio.create_task(self._pass_on(from_server, writer)),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            to_server.close()
        self._clients.discard(writer)
        writer.close()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, from_client: bool = False
    ) -> None:
        while chunk := await reader.read(_CHUNK):
            if from_client and self._needle and self._needle in chunk:
                self._needle = b""
                self.pause()
                self.found.set()
            generation = self._generation
            await self._forwarding.wait()
            if generation != self._generation:
                return
            writer.write(chunk)
            await writer.drain()


@asynccontextmanager
async def tcp_proxy(port: int) -> AsyncIterator[TcpProxy]:
    """Open a proxy to the server on ``port``."""
    proxy = TcpProxy(port)
    server = await asyncio.start_server(proxy.serve, LOOPBACK, 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
