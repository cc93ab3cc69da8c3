"""Concurrent coroutines and sleeps, in an event loop or without one.

Outside of an event loop, the awaitables below are yielded to whatever drives the coroutine. Spark tasks run without an
event loop, since a loop would cost more than the work itself.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Iterator, Sequence

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# The server drops its whole queue of API requests at ten thousand.
MAX_CONCURRENT = 256
# For so long a thread works for one task before the others of its event loop run.
_SLICE_SECONDS = 0.004
_STARTED_AT_ONCE = 16


class Gather:
    """Coroutines that a driver is to run concurrently."""

    __slots__ = ("coroutines",)

    def __init__(self, coroutines: Sequence[Coroutine[Any, Any, Any]]) -> None:
        self.coroutines = coroutines

    def __await__(self) -> Generator[Gather, list[Any], list[Any]]:
        return (yield self)


class Sleep:
    """A pause that a driver is to make."""

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __await__(self) -> Generator[Sleep, None, None]:
        yield self


async def gather(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run coroutines concurrently and return for each its result or its exception."""
    if not _in_event_loop():
        return await Gather(coroutines)
    tasks = await _start_all(coroutines)
    # Some end without having to wait.
    if waiting := [task for task in tasks if not task.done()]:
        await asyncio.gather(*waiting, return_exceptions=True)
    return [_outcome(task) for task in tasks]


async def _start_all(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[asyncio.Task[Any]]:
    """Start coroutines, and let other tasks run in between: much of the work may be done by starting them."""
    tasks: list[asyncio.Task[Any]] = []
    try:
        for start in range(0, len(coroutines), _STARTED_AT_ONCE):
            tasks += map(_start, coroutines[start : start + _STARTED_AT_ONCE])
            await pause_if_due()
    except asyncio.CancelledError:
        for coroutine in coroutines[len(tasks) :]:
            coroutine.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return tasks


def _start(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    if sys.version_info >= (3, 12):
        return asyncio.Task(coroutine, loop=asyncio.get_running_loop(), eager_start=True)
    return asyncio.create_task(coroutine)


def _outcome(task: asyncio.Task[Any]) -> Any:
    if task.cancelled():
        return asyncio.CancelledError()
    return task.exception() or task.result()


async def sleep(seconds: float) -> None:
    """Sleep."""
    await (asyncio.sleep(seconds) if _in_event_loop() else Sleep(seconds))


async def in_thread(function: Callable[[], _Result]) -> _Result:
    """Call a function that takes long: in a thread, so that the other tasks of the event loop run meanwhile.

    Without an event loop nothing else would run, and the function is called here.
    """
    return await asyncio.to_thread(function) if _in_event_loop() else function()


class _Slice(threading.local):
    """When a thread last let other tasks run, by its CPU time."""

    began = 0.0


_slice = _Slice()


async def pause_if_due() -> None:
    """Let other tasks of the event loop run, where the thread has worked for some milliseconds since it last did."""
    if time.thread_time() - _slice.began >= _SLICE_SECONDS and _in_event_loop():
        await asyncio.sleep(0)
        _slice.began = time.thread_time()


async def map_concurrently(
    function: Callable[[_Item], Coroutine[Any, Any, _Result]], items: Iterable[_Item]
) -> list[_Result]:
    """Call a coroutine function for many items, :data:`MAX_CONCURRENT` at a time, and return the results in order.

    :raises Exception: the first that a call raised, once all concurrent calls have ended
    """
    results: list[_Result] = []
    all_items = list(items)
    for start in range(0, len(all_items), MAX_CONCURRENT):
        for result in await gather([function(item) for item in all_items[start : start + MAX_CONCURRENT]]):
            if isinstance(result, BaseException):
                raise result
            results.append(result)
    return results


async def in_order(coroutines: Iterator[Coroutine[Any, Any, _Result]], ahead: int) -> AsyncGenerator[_Result, None]:
    """Run coroutines one after the other and return their results; of each, once it is asked for.

    :param ahead: how many of those behind it run meanwhile; needs an event loop
    """
    if not ahead:
        for coroutine in coroutines:
            yield await coroutine
        return
    tasks: deque[asyncio.Task[_Result]] = deque()
    try:
        while True:
            tasks.extend(map(asyncio.create_task, islice(coroutines, ahead + 1 - len(tasks))))
            if not tasks:
                return
            yield await tasks[0]
            tasks.popleft()
    finally:
        for task in tasks:
            task.cancel()
        # Each error but the first one that the caller has got is of no interest any more.
        await asyncio.gather(*tasks, return_exceptions=True)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
