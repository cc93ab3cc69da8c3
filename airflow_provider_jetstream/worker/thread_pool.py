"""Threads for handlers that block."""

from __future__ import annotations

import asyncio
import contextvars
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

from airflow_provider_jetstream.worker.handler import HandlerResult

if TYPE_CHECKING:
    from collections.abc import Callable

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


class HandlerThreads:
    """A pool with one thread per running function, used from one event loop.

    Not :func:`asyncio.to_thread`: its pool may have fewer threads than the worker's concurrency, so that jobs would
    wait while their ack wait passes, and a function that hangs would keep the process from exiting.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = 0
        self._idle = 0

    def start(self, function: Callable[[_Argument], _Result], argument: _Argument) -> asyncio.Future[_Result]:
        """Run a function in a thread.

        The future holds what the function returns or raises, a :class:`RuntimeError` where the function tried to exit
        the process. Cancelling the future doesn't end the function.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Result] = loop.create_future()
        context = contextvars.copy_context()

        def call() -> None:
            with HandlerResult() as result:
                result.value = context.run(function, argument)
            # The loop is closed when the worker stopped without waiting for this thread.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._resolve, future, result)

        if self._idle:
            self._idle -= 1
        else:
            self._threads += 1
            Thread(target=self._serve, daemon=True, name=f"handler-{self._threads}").start()
        self._calls.put(call)
        return future

    def close(self) -> None:
        """Let each thread end after its current call."""
        for _ in range(self._threads):
            self._calls.put(None)

    def _serve(self) -> None:
        while call := self._calls.get():
            call()

    def _resolve(self, future: asyncio.Future[_Result], result: HandlerResult) -> None:
        self._idle += 1
        if not future.done():
            resolve = (
                partial(future.set_exception, result.error)
                if result.error
                else partial(future.set_result, result.value)
            )
            resolve()
