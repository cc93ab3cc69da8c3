"""A TCP proxy between clients and a server that can stop forwarding without closing a connection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from testbed.ports import LOOPBACK

_CHUNK = 65_536


class TcpProxy:
    """Forwards bytes in tasks directions while it isn't paused; ``port`` is the server's port."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._forwarding = asyncio.Event()
        self._forwarding.set()
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

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward the bytes of one client and the server."""
        with suppress(OSError):
            from_server, to_server = await asyncio.open_connection(LOOPBACK, self._server_port)
            tasks = [
                asyncio.create_task(self._pass_on(reader, to_server)),
                asyncio.create_task(self._pass_on(from_server, writer)),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            to_server.close()
        writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(_CHUNK):
            await self._forwarding.wait()
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
