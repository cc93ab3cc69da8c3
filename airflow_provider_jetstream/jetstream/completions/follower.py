"""One reader of a queue's ends for everybody who waits for its jobs over one connection."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from airflow_provider_jetstream.jetstream.completions.ends import Kind
from airflow_provider_jetstream.jetstream.completions.reconciling import Reconciler
from airflow_provider_jetstream.jetstream.completions.source import Source
from airflow_provider_jetstream.jetstream.errors import TransientError
from airflow_provider_jetstream.jetstream.names import (
    ACK_METRIC,
    MAX_DELIVERIES,
    TERMINATED,
    completion_filter,
    completion_subject,
)
from airflow_provider_jetstream.jetstream.reading import WIDEST, at_once
from airflow_provider_jetstream.jetstream.stored import last_message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
    from typing import Any

    from airflow_provider_jetstream.jetstream.completions.ends import End
    from airflow_provider_jetstream.jetstream.completions.mark import Mark
    from airflow_provider_jetstream.jetstream.completions.report import WaitReport
    from airflow_provider_jetstream.jetstream.completions.tolerance import Tolerance
    from airflow_provider_jetstream.jetstream.connection import Connection

log = logging.getLogger(__name__)

_RETRY_PAUSE = 1.0


class Waiter:
    """Somebody who waits for jobs.

    :param mark: taken before the jobs were published
    :param report: how far they are
    :param tolerance: when waiting is over before every job has ended
    :param progress: called after each end
    """

    __slots__ = ("_progress", "_tolerance", "mark", "over", "report")

    def __init__(
        self, mark: Mark, report: WaitReport, tolerance: Tolerance, progress: Callable[[WaitReport], None]
    ) -> None:
        self.mark = mark
        self.report = report
        self._tolerance = tolerance
        self._progress = progress
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._look()

    def take(self, end: End) -> None:
        """Take note of an end.

        :param end: how a job ended
        """
        if self.over.done() or not self.report.record(end):
            return
        self._progress(self.report)
        self._look()

    def _look(self) -> None:
        if self._tolerance.is_over(self.report):
            self.over.set_result(None)


class Follower:
    """Reads the ends of a queue's jobs and hands each to those who wait for it.

    :param connection: the server
    :param mark: the first waiter's
    """

    def __init__(self, connection: Connection, mark: Mark) -> None:
        self._connection = connection
        self._mark = mark
        self._waiting: dict[int, list[Waiter]] = {}
        ends = (completion_filter(mark.queue), f"{ACK_METRIC}.{mark.queue}.*")
        self._events = Source(connection, mark.events, ends, mark, mark.events_from, self._read)
        self._deaths: Source | None = None
        if mark.dead_letters:
            told = (f"{MAX_DELIVERIES}.{mark.queue}.*", f"{TERMINATED}.{mark.queue}.*")
            self._deaths = Source(connection, mark.dead_letters, told, mark, mark.dead_letters_from, self._read)
        self._doubtful: asyncio.Queue[End] = asyncio.Queue()
        self._reconciler = Reconciler(connection, mark, self._waiting.keys(), self._end, self._all_read)
        self._tasks: list[asyncio.Task[None]] = []
        self.users = 0

    @property
    def failed(self) -> bool:
        """Whether it has given up, and another one is needed."""
        return any(task.done() for task in self._tasks)

    def start(self) -> None:
        """Begin to read."""
        works: list[Coroutine[Any, Any, None]] = [self._confirm(), self._reconciler.run()]
        for source in filter(None, (self._events, self._deaths)):
            works += [source.follow(), source.look_back()]
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

    def join(self, waiter: Waiter) -> None:
        """Tell a waiter of the ends of its jobs, those from before too.

        :param waiter: who waits
        """
        sequences = waiter.report.open()
        for sequence in sequences:
            self._waiting.setdefault(sequence, []).append(waiter)
        for source, start in self._starts(waiter.mark):
            for end in source.known(sequences, start):
                self._read(source, end)
            source.read_from(start)

    def leave(self, waiter: Waiter) -> None:
        """Tell a waiter no more.

        :param waiter: who waited
        """
        for sequence in waiter.report.open():
            self._forget(sequence, waiter)

    def _starts(self, mark: Mark) -> Iterator[tuple[Source, int]]:
        yield self._events, mark.events_from
        if self._deaths:
            yield self._deaths, mark.dead_letters_from

    def _read(self, source: Source, end: End) -> None:
        if end.sequence not in self._waiting:
            return
        if end.kind is Kind.DEAD:
            # Its completion may be stored too, and who joins late must not give up over this.
            self._doubtful.put_nowait(end)
        else:
            self._tell(end, source)

    async def _all_read(self) -> None:
        for source in filter(None, (self._events, self._deaths)):
            await source.all_read()

    def _end(self, end: End) -> None:
        self._tell(end, None)

    def _tell(self, end: End, source: Source | None) -> None:
        for waiter in tuple(self._waiting.get(end.sequence, ())):
            start = next((start for each, start in self._starts(waiter.mark) if each is source), 0)
            if end.at and end.at < start:
                continue
            waiter.take(end)
            if end.kind in (Kind.COMPLETED, Kind.CANCELLED):
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
            await self._events.all_read()
            while len(ends) < WIDEST and not self._doubtful.empty():
                ends.append(self._doubtful.get_nowait())
            try:
                completed = await at_once(self._is_completed, ends)
            except TransientError as error:
                if self._connection.client.is_closed:
                    raise
                log.warning("Reading %s failed, trying again: %s", self._mark.events, error)
                for end in ends:
                    self._doubtful.put_nowait(end)
                await asyncio.sleep(_RETRY_PAUSE)
                continue
            for end, alive in zip(ends, completed, strict=True):
                if not alive:
                    self._tell(end, self._deaths)

    async def _is_completed(self, end: End) -> bool:
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
            if not waiter.over.done():
                waiter.over.set_exception(error)


_followers: WeakKeyDictionary[Connection, dict[tuple[str | None, ...], Follower]] = WeakKeyDictionary()


@asynccontextmanager
async def following(connection: Connection, mark: Mark) -> AsyncIterator[Follower]:
    """Use the one follower of a queue over a connection; the last user stops it.

    :param connection: the server
    :param mark: says which queue and which streams
    :return: the follower
    """
    followers = _followers.setdefault(connection, {})
    key = (mark.queue, mark.created, mark.events, mark.dead_letters)
    follower = followers.get(key)
    if follower is None or follower.failed:
        follower = followers[key] = Follower(connection, mark)
        follower.start()
    follower.users += 1
    try:
        yield follower
    finally:
        follower.users -= 1
        if not follower.users:
            if followers.get(key) is follower:
                del followers[key]
            await follower.stop()
