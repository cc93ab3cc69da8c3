"""Reads jobs in a thread of its own, so that a source that blocks, such as a query, never blocks the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Generator
from contextlib import ExitStack
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Final, Self

from airflow_provider_jetstream.jetstream.publishing.preparation import PreparedJobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future
    from types import TracebackType

    from airflow_provider_jetstream.jetstream.publishing.batch import Batch

logger = logging.getLogger(__name__)

# Seconds in which jobs that come in quick succession gather, so that they aren't handed over one by one.
_GATHER: Final = 0.001
_MAX_BYTES: Final = 4 << 20
_AT_ONCE: Final = 1_000
_END: Final = object()
_LONG: Final = 60.0
# Seconds that an asynchronous source has for its own cleaning up when it is ended early.
_CLEANUP_SECONDS: Final = 2.0
_PAUSE: Final = 0.001


class JobReader:
    """Reads a bounded number of jobs ahead of the sender, and closes the source when the block ends.

    Jobs of a list are prepared before the first is returned. Those of another source become a batch when there are
    enough of them, or when the sender has no other: then it prepares them itself, since the source may block.
    """

    def __init__(self, jobs: PreparedJobs | Iterable[Batch], ahead: int) -> None:
        self._jobs = jobs
        self._ahead = ahead
        # The thread appends, the event loop takes; each has counts of its own.
        self._read: deque[Batch] = deque()
        self._offset = 0
        # What is read and not prepared yet, which happens under the lock, in the order of the jobs.
        self._unprepared: list[Any] = []
        self._preparing = threading.Lock()
        self._bytes_read = self._jobs_read = 0
        self._bytes_taken = self._jobs_taken = 0
        self._room = threading.Event()
        self._error: BaseException | None = None
        self._has_ended = False
        self._is_awaited = False
        self._took_some = False
        self._available = asyncio.Event()
        self._closed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._is_cancelled = False
        # What the thread waits for from an asynchronous source.
        self._future: Future[object] | None = None
        # A daemon: a process may end although a source blocks.
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._run,), name="jetstream-jobs", daemon=True
        )

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_cancelled = True
        self._room.set()
        if self._future:
            self._future.cancel()
        try:
            async with asyncio.timeout(_CLEANUP_SECONDS):
                await self._closed.wait()
        except TimeoutError:
            logger.warning(
                "The source of the jobs blocks, and is left behind in its thread: it is ended when it returns"
            )

    @property
    def error(self) -> BaseException | None:
        """What the source raised, after all jobs before it."""
        return self._error if self._has_ended and not self._read else None

    def take_ready(self, count: int, size: int) -> list[Batch]:
        """Return the next jobs that are there, at most as many and as large, or one."""
        taken: list[Batch] = []
        while count > 0 and (self._read or (not taken and self._prepare_at_once())):
            batch, start = self._read[0], self._offset
            rest = len(batch) - start
            part = batch.part(start, start + min(rest, count))
            while len(part) > 1 and part.size > size:
                part = part.part(0, len(part) // 2)
            if taken and part.size > size:
                break
            if len(part) < rest:
                self._offset += len(part)
            else:
                self._read.popleft()
                self._offset = 0
            taken.append(part)
            count, size = count - len(part), size - part.size
            self._jobs_taken += len(part)
            self._bytes_taken += part.size
        if taken:
            self._took_some = True
            if self._jobs_read - self._jobs_taken <= self._ahead // 2 and not self._room.is_set():
                self._room.set()
        return taken

    @property
    def ended(self) -> bool:
        """Whether no more jobs come."""
        # In this order: the last job comes before the end.
        return self._has_ended and not self._read and not self._unprepared

    async def wait(self, seconds: float) -> None:
        """Wait until there is a job, or the jobs have ended, for so long at most."""
        if self._took_some:
            self._took_some = False
            await asyncio.sleep(min(_GATHER, seconds))
        self._available.clear()
        self._is_awaited = True
        # What comes from here on sets the event.
        if self._read or self._unprepared or self._has_ended:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._available.wait()
        except TimeoutError:
            return

    # In the thread.

    def _run(self) -> None:
        try:
            jobs = self._jobs
            if isinstance(jobs, PreparedJobs) and not jobs.is_whole:
                with ExitStack() as cleanup:
                    self._read_source(jobs, cleanup)
            else:
                for batch in list(jobs.batches() if isinstance(jobs, PreparedJobs) else jobs):
                    self._append(batch)
        except BaseException as error:  # noqa: BLE001
            # A source may raise anything; the event loop raises it again.
            self._error = self._error or error
        self._has_ended = True
        self._call_soon(self._available.set)
        self._call_soon(self._closed.set)

    def _read_source(self, jobs: PreparedJobs, cleanup: ExitStack) -> None:
        source = jobs.source
        if isinstance(source, Generator):
            cleanup.callback(source.close)
        items = self._iterate_on_loop(source, cleanup) if isinstance(source, AsyncIterable) else iter(source)
        try:
            while self._wait_for_room():
                item = next(items, _END)
                if item is _END:
                    return
                with self._preparing:
                    self._unprepared.append(item)
                    # At most half of what is read ahead, so that a batch is prepared while another one is sent.
                    if len(self._unprepared) >= min(jobs.batch_jobs, max(1, self._ahead // 2)):
                        self._prepare()
                if self._is_awaited:
                    self._is_awaited = False
                    self._call_soon(self._available.set)
        finally:
            with self._preparing:
                self._prepare()

    def _iterate_on_loop(self, items: AsyncIterable[object], cleanup: ExitStack) -> Iterator[object]:
        """Read an asynchronous source, on the event loop."""
        iterator = aiter(items)
        if isinstance(iterator, AsyncGenerator):
            cleanup.callback(self._close_on_loop, iterator)

        async def next_item() -> object:
            return await anext(iterator, _END)

        while True:
            self._future = asyncio.run_coroutine_threadsafe(next_item(), self._loop)
            if self._is_cancelled:
                self._future.cancel()
            if (item := self._future.result()) is _END:
                return
            yield item

    def _close_on_loop(self, items: AsyncGenerator[object, None]) -> None:
        async def close() -> None:
            # What it was about to yield is cancelled first; nothing says when that is done.
            while getattr(items, "ag_running", False):  # noqa: ASYNC110
                await asyncio.sleep(_PAUSE)
            await items.aclose()

        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(close(), self._loop).result(_CLEANUP_SECONDS)

    def _prepare_at_once(self) -> bool:
        """Make a batch of the jobs that are read, unless the thread does; return whether there is one to be taken."""
        if self._unprepared and self._preparing.acquire(blocking=False):
            try:
                self._prepare()
            finally:
                self._preparing.release()
        return bool(self._read)

    def _prepare(self) -> None:
        items, self._unprepared = self._unprepared, []
        jobs = self._jobs
        if not items or self._error or not isinstance(jobs, PreparedJobs):
            # What comes after a job that can't be published isn't published either.
            return
        for batch in jobs.prepare(items):
            self._append(batch)
        if jobs.error:
            self._error, self._has_ended, self._is_cancelled = jobs.error, True, True
            self._room.set()

    def _append(self, batch: Batch) -> None:
        self._bytes_read += batch.size
        self._jobs_read += len(batch)
        self._read.append(batch)

    def _wait_for_room(self) -> bool:
        """Wait until one more job may be read; return whether it still should be."""
        while self._is_full() and not self._is_cancelled:
            self._room.clear()
            # What is taken from here on sets the event.
            if self._is_full() and not self._is_cancelled:
                self._room.wait()
        return not self._is_cancelled

    def _is_full(self) -> bool:
        ahead = self._jobs_read - self._jobs_taken + len(self._unprepared)
        return ahead >= self._ahead or self._bytes_read - self._bytes_taken >= _MAX_BYTES

    def _call_soon(self, function: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            # The loop is closed, so nobody waits any more.
            self._is_cancelled = True


async def read_all(jobs: PreparedJobs) -> list[Batch]:
    """Read jobs that have to be known all at once."""
    read: list[Batch] = []
    async with JobReader(jobs, _AT_ONCE) as reader:
        while True:
            if batches := reader.take_ready(_AT_ONCE, _MAX_BYTES):
                read += batches
            elif reader.error:
                raise reader.error
            elif reader.ended:
                return read
            else:
                await reader.wait(_LONG)
