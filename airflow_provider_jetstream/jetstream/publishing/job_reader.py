"""Reads jobs in a thread of its own, so that a source that blocks, such as a query, never blocks the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from contextvars import copy_context
from typing import TYPE_CHECKING, Self

from airflow_provider_jetstream.jetstream.publishing.reading_thread import CLEANUP_SECONDS, ReadingThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob

logger = logging.getLogger(__name__)

# Seconds in which jobs that come in quick succession gather, so that they aren't handed over one by one.
_GATHER = 0.001
_MAX_BYTES = 4 << 20
_AT_ONCE = 1_000
_LONG = 60.0


class JobReader:
    """Reads jobs ahead of the sender, and ends their source when it is left.

    :param jobs: read in the thread only, and with it whatever generators it is made of
    :param ahead: how many jobs may be read ahead
    """

    def __init__(self, jobs: Iterable[OutgoingJob], ahead: int) -> None:
        self._jobs = jobs
        self._ahead = ahead
        # The thread appends, the event loop takes; each has a count of its own.
        self._read: deque[OutgoingJob] = deque()
        self._bytes_read = 0
        self._bytes_taken = 0
        self._room = threading.Event()
        self._error: BaseException | None = None
        self._has_ended = False
        self._is_awaited = False
        self._took_some = False
        self._available = asyncio.Event()
        self._closed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._thread = ReadingThread(copy_context().run, self._run)

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.cancel()
        self._room.set()
        try:
            async with asyncio.timeout(CLEANUP_SECONDS):
                await self._closed.wait()
        except TimeoutError:
            logger.warning(
                "The source of the jobs blocks, and is left behind in its thread: it is ended when it returns"
            )

    def take(self) -> OutgoingJob | None:
        """Return the next job, or ``None`` where none is there (yet).

        :raises BaseException: what the source raised, after all jobs before it
        """
        if self._read:
            self._took_some = True
            job = self._read.popleft()
            self._bytes_taken += len(job.body or b"")
            self._make_room()
            return job
        if self._has_ended and self._error:
            raise self._error
        return None

    def take_ready(self, count: int, size: int) -> list[OutgoingJob]:
        """Return the next jobs that are there.

        :param count: how many at most
        :param size: of the bodies together, after which no further one is taken
        """
        taken: list[OutgoingJob] = []
        read, limit = self._read, self._bytes_taken + size
        while read and len(taken) < count and self._bytes_taken < limit:
            taken.append(job := read.popleft())
            self._bytes_taken += len(job.body or b"")
        if taken:
            self._took_some = True
            self._make_room()
        return taken

    def _make_room(self) -> None:
        if len(self._read) <= self._ahead // 2 and not self._room.is_set():
            self._room.set()

    @property
    def ended(self) -> bool:
        """Whether no more jobs come."""
        # In this order: the last job comes before the end.
        return self._has_ended and not self._read

    async def wait(self, seconds: float) -> None:
        """Wait until there is a job, or the jobs have ended.

        :param seconds: for how long at most
        """
        if self._took_some:
            self._took_some = False
            await asyncio.sleep(min(_GATHER, seconds))
        self._available.clear()
        self._is_awaited = True
        # What comes from here on sets the event.
        if self._read or self._has_ended:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._available.wait()
        except TimeoutError:
            return

    def _run(self) -> None:
        try:
            self._read_all()
        except BaseException as error:  # noqa: BLE001
            # A source may raise anything; the event loop raises it again.
            self._error = error
        self._has_ended = True
        self._call_soon(self._available.set)
        self._call_soon(self._closed.set)

    def _read_all(self) -> None:
        with self._thread.cleanup:
            jobs = iter(self._jobs)
            while self._wait_for_room():
                job = next(jobs, None)
                if job is None:
                    return
                self._bytes_read += len(job.body or b"")
                self._read.append(job)
                if self._is_awaited:
                    self._is_awaited = False
                    self._call_soon(self._available.set)

    def _wait_for_room(self) -> bool:
        """Wait until one more job may be read; return whether it still should be."""
        while self._is_full() and not self._thread.is_cancelled:
            self._room.clear()
            # What is taken from here on sets the event.
            if self._is_full() and not self._thread.is_cancelled:
                self._room.wait()
        return not self._thread.is_cancelled

    def _is_full(self) -> bool:
        return len(self._read) >= self._ahead or self._bytes_read - self._bytes_taken >= _MAX_BYTES

    def _call_soon(self, function: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            # The loop is closed, so nobody waits any more.
            self._thread.cancel()


async def read_all(jobs: Iterable[OutgoingJob]) -> list[OutgoingJob]:
    """Read jobs that have to be known all at once.

    :raises BaseException: what their source raised
    """
    read: list[OutgoingJob] = []
    async with JobReader(jobs, _AT_ONCE) as reader:
        while True:
            if job := reader.take():
                read.append(job)
            elif reader.ended:
                return read
            else:
                await reader.wait(_LONG)
