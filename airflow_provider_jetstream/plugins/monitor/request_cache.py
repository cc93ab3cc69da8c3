"""Doing for all who ask at the same time what one of them would have to do alone, and keeping it for a moment."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable

_Result = TypeVar("_Result")


class SingleFlightCache(Generic[_Result]):
    """Results by what was asked; the oldest are forgotten first.

    :param most: how many results are kept
    :param seconds: for how long
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self._tasks: OrderedDict[Hashable, tuple[float, asyncio.Future[_Result]]] = OrderedDict()

    async def get(self, key: Hashable, make: Callable[[], Awaitable[_Result]]) -> _Result:
        """Take what was made for another just before, wait for who makes it, or make it.

        :param key: what is asked for
        :param make: called if nobody has asked for it lately
        :return: the result; whoever waits for the same gets the same error
        """
        now = time.monotonic()
        at, task = self._tasks.get(key, (0.0, None))
        if task is None or (task.done() and (now - at > self._seconds or task.cancelled() or task.exception())):
            task = asyncio.ensure_future(self._make(key, make))
            self._tasks[key] = (now, task)
            self._tasks.move_to_end(key)
            while len(self._tasks) > self._most:
                self._tasks.popitem(last=False)
        # Shielded: one viewer who gives up mustn't take it from the others.
        return await asyncio.shield(task)

    async def _make(self, key: Hashable, make: Callable[[], Awaitable[_Result]]) -> _Result:
        result = await make()
        if key in self._tasks:
            # It is as old as its end.
            self._tasks[key] = (time.monotonic(), self._tasks[key][1])
        return result

    def clear(self) -> None:
        """Forget all results."""
        self._tasks.clear()
