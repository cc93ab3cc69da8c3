"""A wire between clients and a server that can be cut without either end being told."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from testbed.ports import LOOPBACK

_PIECE = 65_536


class Wire:
    """
    What passes bytes on in both directions while it is whole.

    :param port: the server's port
    """

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._whole = asyncio.Event()
        self._whole.set()
        self.port = 0

    @property
    def url(self) -> str:
        """Where clients connect to."""
        return f"nats://{LOOPBACK}:{self.port}"

    def cut(self) -> None:
        """Hold everything back from now on; no connection is closed."""
        self._whole.clear()

    def mend(self) -> None:
        """Pass on what was held back, and all that follows."""
        self._whole.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """
        Pass on what one client and the server say.

        :param reader: from the client
        :param writer: to the client
        """
        with suppress(OSError):
            answers, questions = await asyncio.open_connection(LOOPBACK, self._server_port)
            both = [
                asyncio.create_task(self._pass_on(reader, questions)),
                asyncio.create_task(self._pass_on(answers, writer)),
            ]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for each in both:
                each.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            questions.close()
        writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(_PIECE):
            await self._whole.wait()
            writer.write(piece)
            await writer.drain()


@asynccontextmanager
async def wire(port: int) -> AsyncIterator[Wire]:
    """
    Lay a wire to a server.

    :param port: the server's port
    """
    laid = Wire(port)
    server = await asyncio.start_server(laid.serve, LOOPBACK, 0)
    laid.port = server.sockets[0].getsockname()[1]
    try:
        yield laid
    finally:
        server.close()
