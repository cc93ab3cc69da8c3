"""Doing many things at once, and pausing, in an event loop or without one.

Outside of an event loop, whoever drives the coroutine is handed what it waits for: Spark's tasks do so, since an event
loop would cost more than the work.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator, Sequence


class Together:
    """Coroutines that a driver is to run side by side.

    :param coroutines: the coroutines
    """

    __slots__ = ("coroutines",)

    def __init__(self, coroutines: Sequence[Coroutine[Any, Any, Any]]) -> None:
        self.coroutines = coroutines

    def __await__(self) -> Generator[Together, list[Any], list[Any]]:
        return (yield self)


class Pause:
    """Time that a driver is to let pass.

    :param seconds: how much
    """

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __await__(self) -> Generator[Pause, None, None]:
        yield self


async def together(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run coroutines side by side.

    :param coroutines: the coroutines
    :return: for each its result, or what it raised
    """
    if _in_loop():
        return list(await asyncio.gather(*coroutines, return_exceptions=True))
    return await Together(coroutines)


async def pause(seconds: float) -> None:
    """Let time pass.

    :param seconds: how much
    """
    await (asyncio.sleep(seconds) if _in_loop() else Pause(seconds))


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
