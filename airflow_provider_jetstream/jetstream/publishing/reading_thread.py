"""Threads that read the sources of jobs, which may block, or be asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterable, Generator
from contextlib import ExitStack
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.errors import EventLoopError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator
    from concurrent.futures import Future

# Seconds that an asynchronous source has for its own cleaning up when it is ended early.
CLEANUP_SECONDS = 2.0
_PAUSE = 0.001
_END = object()


class ReadingThread(threading.Thread):
    """A thread that reads jobs, and may wait for an asynchronous source.

    :ivar cleanup: ends the sources that the thread has begun to read
    """

    def __init__(self, target: Callable[..., object], *args: object) -> None:
        # A daemon: a process may end although a source blocks.
        super().__init__(target=target, args=args, name="jetstream-jobs", daemon=True)
        self.cleanup = ExitStack()
        self.is_cancelled = False
        self._future: Future[object] | None = None

    def cancel(self) -> None:
        """Make the thread read no more, and wait no longer for an asynchronous source."""
        self.is_cancelled = True
        if self._future:
            self._future.cancel()

    def result(self, coroutine: Coroutine[object, object, object], loop: asyncio.AbstractEventLoop) -> object:
        """Run a coroutine on the event loop and return its result.

        :raises CancelledError: the thread is to end
        """
        self._future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        if self.is_cancelled:
            self._future.cancel()
        return self._future.result()


def iterate(items: Iterable[object] | AsyncIterable[object]) -> Iterator[object]:
    """Return an iterator over items that a :class:`ReadingThread` ends when it stops reading what is made of them.

    An asynchronous source is read on the event loop that runs now.
    """
    if isinstance(items, AsyncIterable):
        return _iterate_on_loop(items, asyncio.get_running_loop())
    return _iterate(items)


def _iterate(items: Iterable[object]) -> Iterator[object]:
    thread = threading.current_thread()
    if isinstance(thread, ReadingThread) and isinstance(items, Generator):
        thread.cleanup.callback(items.close)
    yield from items


def _iterate_on_loop(items: AsyncIterable[object], loop: asyncio.AbstractEventLoop) -> Iterator[object]:
    thread = threading.current_thread()
    if not isinstance(thread, ReadingThread):
        raise EventLoopError(
            "expected an asynchronous source of jobs to be read by publish(), found another reader: pass it on as it is"
        )
    iterator = aiter(items)
    if isinstance(iterator, AsyncGenerator):
        thread.cleanup.callback(_close_on_loop, iterator, loop)

    async def next_item() -> object:
        return await anext(iterator, _END)

    while (item := thread.result(next_item(), loop)) is not _END:
        yield item


def _close_on_loop(items: AsyncGenerator[object, None], loop: asyncio.AbstractEventLoop) -> None:
    async def close() -> None:
        # What it was about to yield is cancelled first; nothing says when that is done.
        while getattr(items, "ag_running", False):  # noqa: ASYNC110
            await asyncio.sleep(_PAUSE)
        await items.aclose()

    if not loop.is_closed():
        asyncio.run_coroutine_threadsafe(close(), loop).result(CLEANUP_SECONDS)
