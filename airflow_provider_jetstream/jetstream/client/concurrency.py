"""Concurrent coroutines and sleeps, in an event loop or without one.

Outside of an event loop, the awaitables below are yielded to whatever drives the coroutine. Spark tasks run without an
event loop, since a loop would cost more than the work itself.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# The server drops its whole queue of API requests at ten thousand.
MAX_CONCURRENT = 256


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
    if _in_event_loop():
        return list(await asyncio.gather(*coroutines, return_exceptions=True))
    return await Gather(coroutines)


async def sleep(seconds: float) -> None:
    """Sleep."""
    await (asyncio.sleep(seconds) if _in_event_loop() else Sleep(seconds))


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


async def keep_cancellation(awaitable: Awaitable[_Result]) -> _Result:
    """Wait, and end with a cancellation that came meanwhile, even if what is awaited goes on all the same.

    Before Python 3.12 ``asyncio.wait_for``, with which nats-py waits for the server, returns a result that came just
    before the cancellation, and the task that was cancelled goes on.
    """
    task = asyncio.current_task()
    cancellations = task.cancelling() if task else 0
    result = await awaitable
    if task and task.cancelling() > cancellations:
        raise asyncio.CancelledError
    return result


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
