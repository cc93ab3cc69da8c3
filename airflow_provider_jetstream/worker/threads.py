"""Running handlers that block."""

from __future__ import annotations

import asyncio
import contextvars
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


class HandlerThreads:
    """As many threads as there are functions running at a time; belongs to one event loop.

    Not :func:`asyncio.to_thread`: its pool may have fewer threads than a worker has slots, so that jobs would wait in
    their ack wait, and a function that hangs would keep the process from ending.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = 0
        self._idle = 0

    async def run(self, function: Callable[[_Argument], _Result], argument: _Argument) -> _Result:
        """Run a function in a thread.

        :param function: the function
        :param argument: its argument
        :return: what it returns
        :raises RuntimeError: it tried to end the process, or raised what can't cross threads
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_Result] = loop.create_future()
        context = contextvars.copy_context()

        def work() -> None:
            action: Callable[[], None]
            try:
                action = partial(done.set_result, context.run(function, argument))
            except BaseException as error:  # noqa: BLE001 - the task that waits learns of it
                action = partial(done.set_exception, _portable(error))
            # The loop is closed when the worker didn't want to wait any longer.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._settle, done, action)

        if self._idle:
            self._idle -= 1
        else:
            self._threads += 1
            Thread(target=self._serve, daemon=True, name=f"handler-{self._threads}").start()
        self._work.put(work)
        return await done

    def close(self) -> None:
        """Let the threads end when they have nothing more to do."""
        for _ in range(self._threads):
            self._work.put(None)

    def _serve(self) -> None:
        while work := self._work.get():
            work()

    def _settle(self, done: asyncio.Future[_Result], action: Callable[[], None]) -> None:
        self._idle += 1
        if not done.done():
            action()


def _portable(error: BaseException) -> Exception:
    # A future refuses StopIteration, and an exit would end the loop with all its jobs instead of failing this one.
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    failure = RuntimeError(f"the handler raised {error!r}")
    failure.__cause__ = error
    return failure
