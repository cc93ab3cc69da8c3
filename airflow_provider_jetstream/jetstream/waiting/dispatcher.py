"""One reader of a queue's ends for everybody who waits for its jobs over one connection."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from airflow_provider_jetstream.jetstream.client.concurrency import MAX_CONCURRENT, map_concurrently
from airflow_provider_jetstream.jetstream.client.message_reader import last_message
from airflow_provider_jetstream.jetstream.contract import (
    ACK_METRIC,
    MAX_DELIVERIES,
    TERMINATED,
    completion_filter,
    completion_subject,
)
from airflow_provider_jetstream.jetstream.errors import TransientError
from airflow_provider_jetstream.jetstream.waiting.event_source import EndSource
from airflow_provider_jetstream.jetstream.waiting.job_end import EndKind
from airflow_provider_jetstream.jetstream.waiting.reconciler import Reconciler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
    from typing import Any

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
    from airflow_provider_jetstream.jetstream.waiting.job_end import JobEnd
    from airflow_provider_jetstream.jetstream.waiting.policy import WaitPolicy
    from airflow_provider_jetstream.jetstream.waiting.report import WaitReport

log = logging.getLogger(__name__)

_RETRY_PAUSE = 1.0


class Waiter:
    """Somebody who waits for jobs.

    :param mark: taken before the jobs were published
    :param report: how far they are
    :param tolerance: when waiting is over before every job has ended
    :param progress: called after each end
    """

    __slots__ = ("_progress", "_tolerance", "cursor", "finished", "report")

    def __init__(
        self, mark: Cursor, report: WaitReport, tolerance: WaitPolicy, progress: Callable[[WaitReport], None]
    ) -> None:
        self.cursor = mark
        self.report = report
        self._tolerance = tolerance
        self._progress = progress
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._look()

    def record_end(self, end: JobEnd) -> None:
        """Take note of an end.

        :param end: how a job ended
        """
        if self.finished.done() or not self.report.record(end):
            return
        self._progress(self.report)
        self._look()

    def _look(self) -> None:
        if self._tolerance.is_finished(self.report):
            self.finished.set_result(None)


class EndDispatcher:
    """Reads the ends of a queue's jobs and hands each to those who wait for it.

    :param connection: the server
    :param mark: the first waiter's
    """

    def __init__(self, connection: Connection, mark: Cursor) -> None:
        self._connection = connection
        self._mark = mark
        self._waiting: dict[int, list[Waiter]] = {}
        ends = (completion_filter(mark.queue), f"{ACK_METRIC}.{mark.queue}.*")
        self._events = EndSource(connection, mark.events, ends, mark, mark.events_from, self._read)
        self._deaths: EndSource | None = None
        if mark.dead_letters:
            told = (f"{MAX_DELIVERIES}.{mark.queue}.*", f"{TERMINATED}.{mark.queue}.*")
            self._deaths = EndSource(connection, mark.dead_letters, told, mark, mark.dead_letters_from, self._read)
        self._doubtful: asyncio.Queue[JobEnd] = asyncio.Queue()
        self._reconciler = Reconciler(connection, mark, self._waiting.keys(), self._end, self._all_read)
        self._tasks: list[asyncio.Task[None]] = []
        self.waiter_count = 0

    @property
    def has_failed(self) -> bool:
        """Whether it has given up, and another one is needed."""
        return any(task.done() for task in self._tasks)

    def start(self) -> None:
        """Begin to read."""
        works: list[Coroutine[Any, Any, None]] = [self._confirm(), self._reconciler.run()]
        for source in filter(None, (self._events, self._deaths)):
            works += [source.follow(), source.read_backlog()]
        for work in works:
            task = asyncio.create_task(work)
            task.add_done_callback(self._stopped)
            self._tasks.append(task)

    async def stop(self) -> None:
        """Read no more."""
        for task in self._tasks:
            task.remove_done_callback(self._stopped)
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def add(self, waiter: Waiter) -> None:
        """Tell a waiter of the ends of its jobs, those from before too.

        :param waiter: who waits
        """
        sequences = waiter.report.unsettled()
        for sequence in sequences:
            self._waiting.setdefault(sequence, []).append(waiter)
        for source, start in self._starts(waiter.cursor):
            for end in source.recent_ends(sequences, start):
                self._read(source, end)
            source.request_backlog(start)

    def remove(self, waiter: Waiter) -> None:
        """Tell a waiter no more.

        :param waiter: who waited
        """
        for sequence in waiter.report.unsettled():
            self._forget(sequence, waiter)

    def _starts(self, mark: Cursor) -> Iterator[tuple[EndSource, int]]:
        yield self._events, mark.events_from
        if self._deaths:
            yield self._deaths, mark.dead_letters_from

    def _read(self, source: EndSource, end: JobEnd) -> None:
        if end.sequence not in self._waiting:
            return
        if end.kind is EndKind.DEAD:
            # Its completion may be stored too, and who joins late must not give up over this.
            self._doubtful.put_nowait(end)
        else:
            self._tell(end, source)

    async def _all_read(self) -> None:
        for source in filter(None, (self._events, self._deaths)):
            await source.wait_until_read()

    def _end(self, end: JobEnd) -> None:
        self._tell(end, None)

    def _tell(self, end: JobEnd, source: EndSource | None) -> None:
        for waiter in tuple(self._waiting.get(end.sequence, ())):
            start = next((start for each, start in self._starts(waiter.cursor) if each is source), 0)
            if end.event_sequence and end.event_sequence < start:
                continue
            waiter.record_end(end)
            if end.kind in (EndKind.COMPLETED, EndKind.CANCELLED):
                self._forget(end.sequence, waiter)

    def _forget(self, sequence: int, waiter: Waiter) -> None:
        waiters = self._waiting.get(sequence, [])
        if waiter in waiters:
            waiters.remove(waiter)
        if not waiters:
            self._waiting.pop(sequence, None)

    async def _confirm(self) -> None:
        while True:
            ends = [await self._doubtful.get()]
            await self._events.wait_until_read()
            while len(ends) < MAX_CONCURRENT and not self._doubtful.empty():
                ends.append(self._doubtful.get_nowait())
            try:
                completed = await map_concurrently(self._is_completed, ends)
            except TransientError as error:
                if self._connection.is_closed:
                    raise
                log.warning("Reading %s failed, trying again: %s", self._mark.events, error)
                for end in ends:
                    self._doubtful.put_nowait(end)
                await asyncio.sleep(_RETRY_PAUSE)
                continue
            for end, alive in zip(ends, completed, strict=True):
                if not alive:
                    self._tell(end, self._deaths)

    async def _is_completed(self, end: JobEnd) -> bool:
        subject = completion_subject(self._mark.queue, end.consumer, end.sequence)
        last = await last_message(self._connection, self._mark.events, subject)
        # Its end is stored, and the events bring it.
        return last is not None and last.stored_at >= datetime.fromisoformat(self._mark.created)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        if (error := task.exception()) is None:
            error = RuntimeError(f"{task.get_coro()} ended by itself")
        waiters = {id(waiter): waiter for waiters in self._waiting.values() for waiter in waiters}
        for waiter in waiters.values():
            if not waiter.finished.done():
                waiter.finished.set_exception(error)


_followers: WeakKeyDictionary[Connection, dict[tuple[str | None, ...], EndDispatcher]] = WeakKeyDictionary()


@asynccontextmanager
async def shared_dispatcher(connection: Connection, mark: Cursor) -> AsyncIterator[EndDispatcher]:
    """Use the one follower of a queue over a connection; the last user stops it.

    :param connection: the server
    :param mark: says which queue and which streams
    :return: the follower
    """
    followers = _followers.setdefault(connection, {})
    key = (mark.queue, mark.created, mark.events, mark.dead_letters)
    follower = followers.get(key)
    if follower is None or follower.has_failed:
        follower = followers[key] = EndDispatcher(connection, mark)
        follower.start()
    follower.waiter_count += 1
    try:
        yield follower
    finally:
        follower.waiter_count -= 1
        if not follower.waiter_count:
            if followers.get(key) is follower:
                del followers[key]
            await follower.stop()
