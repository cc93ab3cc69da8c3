"""Reads jobs in a thread of its own, so that a source that blocks, such as a query, never blocks the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Final, Self

from airflow_provider_jetstream.jetstream.publishing.outgoing_run import ListedRun
from airflow_provider_jetstream.jetstream.publishing.preparation import PreparedJobs
from airflow_provider_jetstream.jetstream.publishing.reading_thread import CLEANUP_SECONDS, ReadingThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.publishing.outgoing_run import OutgoingRun

logger = logging.getLogger(__name__)

# Seconds in which jobs that come in quick succession gather, so that they aren't handed over one by one.
_GATHER = 0.001
_MAX_BYTES = 4 << 20
_AT_ONCE = 1_000
# Of jobs that are prepared already, those that are handed over together.
_LISTED_JOBS = 64
_END: Final = object()
_LONG = 60.0


class JobReader:
    """Reads jobs ahead of the sender, and ends their source when it is left.

    Jobs of a list are prepared before the first is returned. Those of another source become a run when there are enough
    of them, or when the sender has no other: then it prepares them itself, since the source may block.

    :param jobs: read in the thread only, and with it whatever generators it is made of
    :param ahead: how many jobs may be read ahead
    """

    def __init__(self, jobs: Iterable[OutgoingJob], ahead: int) -> None:
        self._jobs = jobs
        self._ahead = ahead
        # The thread appends, the event loop takes; each has counts of its own.
        self._read: deque[OutgoingRun] = deque()
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

    @property
    def error(self) -> BaseException | None:
        """What the source raised, after all jobs before it."""
        return self._error if self._has_ended and not self._read else None

    def take_ready(self, count: int, size: int) -> OutgoingRun | None:
        """Return the next jobs that are there; ``None`` where none is.

        :param count: how many at most
        :param size: of the bodies together, at most unless there is only one
        """
        if not self._read and not self._prepare_at_once():
            return None
        run, start = self._read[0], self._offset
        rest = len(run) - start
        if rest <= count and run.size <= size:
            taken = run.part(start, len(run)) if start else run
        else:
            taken = run.part(start, start + min(rest, count))
            while len(taken) > 1 and taken.size > size:
                taken = taken.part(0, len(taken) // 2)
        if len(taken) < rest:
            self._offset += len(taken)
        else:
            self._read.popleft()
            self._offset = 0
        self._took_some = True
        self._bytes_taken += taken.size
        self._jobs_taken += len(taken)
        if self._jobs_read - self._jobs_taken <= self._ahead // 2 and not self._room.is_set():
            self._room.set()
        return taken

    @property
    def ended(self) -> bool:
        """Whether no more jobs come."""
        # In this order: the last job comes before the end.
        return self._has_ended and not self._read and not self._unprepared

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
        if self._read or self._unprepared or self._has_ended:
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
            self._error = self._error or error
        self._has_ended = True
        self._call_soon(self._available.set)
        self._call_soon(self._closed.set)

    def _read_all(self) -> None:
        jobs = self._jobs
        with self._thread.cleanup:
            if isinstance(jobs, PreparedJobs) and jobs.is_whole:
                for run in list(jobs.runs()):
                    self._append(run)
                return
            items = jobs.items if isinstance(jobs, PreparedJobs) else iter(jobs)
            try:
                while self._wait_for_room():
                    item = next(items, _END)
                    if item is _END:
                        return
                    with self._preparing:
                        self._unprepared.append(item)
                        if len(self._unprepared) >= self._run_jobs:
                            self._prepare()
                    if self._is_awaited:
                        self._is_awaited = False
                        self._call_soon(self._available.set)
            finally:
                with self._preparing:
                    self._prepare()

    @property
    def _run_jobs(self) -> int:
        # At most half of what is read ahead, so that a run is prepared while another one is sent.
        most = self._jobs.run_jobs if isinstance(self._jobs, PreparedJobs) else _LISTED_JOBS
        return min(most, max(1, self._ahead // 2))

    def _prepare_at_once(self) -> bool:
        """Make a run of the jobs that are read, unless the thread does; return whether there is one to be taken."""
        if self._unprepared and self._preparing.acquire(blocking=False):
            try:
                self._prepare()
            finally:
                self._preparing.release()
        return bool(self._read)

    def _prepare(self) -> None:
        items, self._unprepared = self._unprepared, []
        if not items or self._error:
            # What comes after a job that can't be published isn't published either.
            return
        jobs = self._jobs
        if not isinstance(jobs, PreparedJobs):
            self._append(ListedRun(items))
            return
        self._append(jobs.prepare(items))
        if jobs.error:
            self._error, self._has_ended = jobs.error, True
            self._thread.cancel()
            self._room.set()

    def _append(self, run: OutgoingRun) -> None:
        if len(run):
            self._bytes_read += run.size
            self._jobs_read += len(run)
            self._read.append(run)

    def _wait_for_room(self) -> bool:
        """Wait until one more job may be read; return whether it still should be."""
        while self._is_full() and not self._thread.is_cancelled:
            self._room.clear()
            # What is taken from here on sets the event.
            if self._is_full() and not self._thread.is_cancelled:
                self._room.wait()
        return not self._thread.is_cancelled

    def _is_full(self) -> bool:
        ahead = self._jobs_read - self._jobs_taken + len(self._unprepared)
        return ahead >= self._ahead or self._bytes_read - self._bytes_taken >= _MAX_BYTES

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
            if run := reader.take_ready(_AT_ONCE, _MAX_BYTES):
                read += [run.job(offset) for offset in range(len(run))]
            elif reader.error:
                raise reader.error
            elif reader.ended:
                return read
            else:
                await reader.wait(_LONG)
