"""A thread with an event loop of its own, so that work for the page never holds up the API server's loop."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

_Result = TypeVar("_Result")


class LoopThread:
    """A thread that runs coroutines for other threads, started when it is first needed.

    :param name: the thread's name
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Have the thread run a coroutine, and wait for it without blocking.

        :param coroutine: what to run
        :return: its result
        """
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._started()))

    def stop(self) -> None:
        """End the thread and what it runs."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._thread is None or not self._thread.is_alive():
                self._loop = asyncio.new_event_loop()
                # A daemon: the API server's end doesn't wait for it.
                self._thread = threading.Thread(target=_serve, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()
