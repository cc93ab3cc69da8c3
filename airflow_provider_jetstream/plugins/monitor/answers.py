"""Encoded answers that all viewers share, made in the thread of the page's background work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from airflow_provider_jetstream.plugins.monitor.background import SingleFlightCache

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Hashable

    from pydantic import BaseModel

    from airflow_provider_jetstream.plugins.monitor.background import EventLoopThread

_MAX_ANSWERS = 256
_MAX_PAGES = 32
_Result = TypeVar("_Result")


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
