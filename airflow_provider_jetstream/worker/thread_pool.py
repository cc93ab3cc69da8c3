"""Running handlers that block."""

from __future__ import annotations

import asyncio
import contextvars
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

from airflow_provider_jetstream.worker.result import Outcome

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

    def start(self, function: Callable[[_Argument], _Result], argument: _Argument) -> asyncio.Future[_Result]:
        """Run a function in a thread.

        :param function: the function
        :param argument: its argument
        :return: what it returns or raises, a :class:`RuntimeError` where it tried to end the process; nothing ends the
            function, whatever becomes of the future
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_Result] = loop.create_future()
        context = contextvars.copy_context()

        def work() -> None:
            with Outcome() as outcome:
                outcome.value = context.run(function, argument)
            # The loop is closed when the worker didn't want to wait any longer.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._settle, done, outcome)

        if self._idle:
            self._idle -= 1
        else:
            self._threads += 1
            Thread(target=self._serve, daemon=True, name=f"handler-{self._threads}").start()
        self._work.put(work)
        return done

    def close(self) -> None:
        """Let the threads end when they have nothing more to do."""
        for _ in range(self._threads):
            self._work.put(None)

    def _serve(self) -> None:
        while work := self._work.get():
            work()

    def _settle(self, done: asyncio.Future[_Result], outcome: Outcome) -> None:
        self._idle += 1
        if not done.done():
            settle = (
                partial(done.set_exception, outcome.error) if outcome.error else partial(done.set_result, outcome.value)
            )
            settle()
