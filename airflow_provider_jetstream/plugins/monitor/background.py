"""Work for the page in the background: a thread with an event loop, and results that all requests share."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from airflow_provider_jetstream.plugins.monitor import clock

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Hashable

    from pydantic import BaseModel


_Result = TypeVar("_Result")


class EventLoopThread:
    """A thread that runs coroutines for other threads, so that they never block the API server's event loop.

    It starts with the first coroutine.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine in the thread, and await its result without blocking."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._running_loop()))

    def stop(self) -> None:
        """Cancel all coroutines and end the thread."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._thread is None or not self._thread.is_alive():
                self._loop = asyncio.new_event_loop()
                # A daemon: the API server's end doesn't wait for it.
                self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            return self._loop


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()


class SingleFlightCache(Generic[_Result]):
    """Results by key: concurrent requests for a key share one computation, and its result for some time after.

    :param max_results: how many results are cached; the oldest are dropped first
    :param seconds: how long a result is cached
    """

    def __init__(self, max_results: int, seconds: float) -> None:
        self._max_results = max_results
        self._seconds = seconds
        self._tasks: OrderedDict[Hashable, tuple[float, asyncio.Future[_Result]]] = OrderedDict()

    async def get(self, key: Hashable, compute: Callable[[], Awaitable[_Result]]) -> _Result:
        """Return the cached result, join the running computation, or start one.

        All requests that share a computation get its error; no error is cached.
        """
        now = clock.monotonic()
        computed_at, task = self._tasks.get(key, (0.0, None))
        if task is None or (
            task.done() and (now - computed_at > self._seconds or task.cancelled() or task.exception())
        ):
            task = asyncio.ensure_future(self._compute(key, compute))
            self._tasks[key] = (now, task)
            self._tasks.move_to_end(key)
            while len(self._tasks) > self._max_results:
                self._tasks.popitem(last=False)
        # Shielded: a request that is cancelled must not cancel the computation of the others.
        return await asyncio.shield(task)

    async def _compute(self, key: Hashable, compute: Callable[[], Awaitable[_Result]]) -> _Result:
        result = await compute()
        if key in self._tasks:
            # Its age counts from the end of the computation.
            self._tasks[key] = (clock.monotonic(), self._tasks[key][1])
        return result

    def clear(self) -> None:
        """Drop all results."""
        self._tasks.clear()


_MAX_ANSWERS = 256
_MAX_PAGES = 32


class Answers:
    """Answers by what was asked for.

    :param refresh: seconds between two polls of a server: nothing new is known before the next one
    """

    def __init__(self, thread: EventLoopThread, refresh: float) -> None:
        self._thread = thread
        self._of_now: SingleFlightCache[bytes] = SingleFlightCache(_MAX_ANSWERS, min(0.5, refresh / 2))
        self._pages: SingleFlightCache[bytes] = SingleFlightCache(_MAX_PAGES, refresh)

    def clear(self) -> None:
        """Forget all answers."""
        self._of_now.clear()
        self._pages.clear()

    async def now(self, key: Hashable, make: Callable[[], Awaitable[BaseModel]]) -> bytes:
        """Return an answer that is small and changes with each poll."""
        return await self._cached(self._of_now, key, make)

    async def page(self, key: Hashable, make: Callable[[], Awaitable[BaseModel]]) -> bytes:
        """Return an answer that takes requests to the server."""
        return await self._cached(self._pages, key, make)

    async def shared_page(self, key: Hashable, make: Callable[[], Awaitable[BaseModel]]) -> bytes:
        """Return what :meth:`page` does; to be awaited in the thread."""
        return await self._pages.get(key, lambda: _encoded(make))

    async def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine in the thread."""
        return await self._thread.run(coroutine)

    async def stream(self, lines: AsyncGenerator[BaseModel, None]) -> AsyncGenerator[bytes, None]:
        """Return lines as they are made in the thread, each as JSON."""

        async def following() -> BaseModel | None:
            return await anext(lines, None)

        try:
            while (line := await self._thread.run(following())) is not None:
                yield line.model_dump_json().encode() + b"\n"
        finally:
            await self._thread.run(_close(lines))

    async def _cached(
        self, cache: SingleFlightCache[bytes], key: Hashable, make: Callable[[], Awaitable[BaseModel]]
    ) -> bytes:
        return await self._thread.run(cache.get(key, lambda: _encoded(make)))


async def _encoded(make: Callable[[], Awaitable[BaseModel]]) -> bytes:
    return (await make()).model_dump_json().encode()


async def _close(lines: AsyncGenerator[BaseModel, None]) -> None:
    await lines.aclose()
