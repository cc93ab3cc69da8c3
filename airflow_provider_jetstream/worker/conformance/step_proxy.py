"""A proxy between a worker and its server that reads the worker's steps and breaks off at some of them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.client.wire import SentFrameReader
from airflow_provider_jetstream.jetstream.errors import WireError
from airflow_provider_jetstream.worker.conformance.steps import SentStep, step_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

_HOST: Final = "127.0.0.1"
_CHUNK: Final = 65_536
# For the server to act on the last frame that it gets.
_SECONDS_TO_ACT: Final = 0.3
_SECONDS_TO_END: Final = 2.0


@dataclass(frozen=True, slots=True)
class Fault:
    """A place at which the connection breaks, once.

    :param after: whether the server still gets what the worker sends there, and only its answer is lost
    """

    at: SentStep
    after: bool


@dataclass(slots=True)
class StepProxy:
    """Forwards bytes between workers of one consumer and the server.

    :param server: host and port of the server
    :param faults: the places at which connections break, each once
    :param broken_off: called at each of them, before the connection is closed
    :ivar seen: the steps in their order
    """

    server: tuple[str, int]
    queue: str
    consumer: str
    faults: set[Fault] = field(default_factory=set)
    broken_off: Callable[[], object] = lambda: None
    seen: list[SentStep] = field(default_factory=list)
    port: int = 0
    _open: dict[asyncio.Task[None], asyncio.StreamWriter] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """The address for the worker."""
        return f"nats://{_HOST}:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward the bytes of one connection."""
        if task := asyncio.current_task():
            self._open[task] = writer
            task.add_done_callback(self._open.pop)
        with suppress(OSError, WireError):
            link = _Link(self, reader, writer, *await asyncio.open_connection(*self.server))
            await link.run()
        writer.transport.abort()

    async def close(self) -> None:
        """Close all connections."""
        for writer in self._open.values():
            writer.transport.abort()
        # They end by themselves: asyncio complains of a connection whose task is cancelled.
        if self._open:
            await asyncio.wait(tuple(self._open), timeout=_SECONDS_TO_END)

    def fault_at(self, sent: SentStep) -> Fault | None:
        """Note a step, and return the fault that it meets; the fault doesn't occur again."""
        self.seen.append(sent)
        fault = next((fault for fault in self.faults if fault.at == sent), None)
        if fault:
            self.faults.remove(fault)
        return fault


@dataclass(slots=True)
class _Link:
    proxy: StepProxy
    from_worker: asyncio.StreamReader
    to_worker: asyncio.StreamWriter
    from_server: asyncio.StreamReader
    to_server: asyncio.StreamWriter
    is_answered: bool = True

    async def run(self) -> None:
        tasks = [asyncio.create_task(self._to_server()), asyncio.create_task(self._to_worker())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.to_server.transport.abort()

    async def _to_server(self) -> None:
        frames = SentFrameReader()
        while chunk := await self.from_worker.read(_CHUNK):
            for frame in frames.feed(chunk):
                sent = step_of(frame, self.proxy.queue, self.proxy.consumer) if frame.subject else None
                fault = self.proxy.fault_at(sent) if sent else None
                if fault:
                    await self._break_off(frame.data if fault.after else b"")
                    return
                self.to_server.write(frame.data)
            await self.to_server.drain()

    async def _break_off(self, last: bytes) -> None:
        self.is_answered = False
        self.to_server.write(last)
        await self.to_server.drain()
        await asyncio.sleep(_SECONDS_TO_ACT)
        self.proxy.broken_off()

    async def _to_worker(self) -> None:
        while chunk := await self.from_server.read(_CHUNK):
            if self.is_answered:
                self.to_worker.write(chunk)
                await self.to_worker.drain()


@asynccontextmanager
async def step_proxy(proxy: StepProxy) -> AsyncIterator[StepProxy]:
    """Open a proxy on a free port until the block ends."""
    server = await asyncio.start_server(proxy.serve, _HOST, 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
