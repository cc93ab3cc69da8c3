"""The one follower of a queue's ends, shared by all waits of a connection.

It reads what the companions of the queue say about ends, reads the facts that an end needs to count, decides, and gives
each end to the waits for its job:

- what a worker states counts where its consumer may have had the job;
- a death counts where no completion is stored and the audit doesn't know more of the job, once all of it is read;
- a report on an advisory subject counts by :class:`_AdvisedEnds`;
- for the new job of a redriven one, the follower of its queue is used in turn.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from airflow_provider_jetstream.jetstream.client.concurrency import MAX_CONCURRENT, map_concurrently
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.stream_tail import StreamTail
from airflow_provider_jetstream.jetstream.client.streams import last_message
from airflow_provider_jetstream.jetstream.contract import completion_subject
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    JetStreamProviderError,
    NotFoundError,
    PermissionDeniedError,
    QueueGoneError,
    TransientError,
)
from airflow_provider_jetstream.jetstream.queue.discovery import discover_queue
from airflow_provider_jetstream.jetstream.waiting.comparison import Comparison, QueueConsumers, other_stream, read_jobs
from airflow_provider_jetstream.jetstream.waiting.cursor import UNKNOWN_REDRIVES, take_cursor
from airflow_provider_jetstream.jetstream.waiting.ends import (
    AdvisoryReport,
    EndKind,
    EndReader,
    JobEnd,
    is_superseded,
    said_most,
)
from airflow_provider_jetstream.jetstream.waiting.waiter import AwaitedJobs, SuccessorWaiter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.client.stream_tail import TailedMessage
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
    from airflow_provider_jetstream.jetstream.waiting.ends import Statement, Successor
    from airflow_provider_jetstream.jetstream.waiting.waiter import Waiter

log = logging.getLogger(__name__)

_RETRY_PAUSE = 1.0
# Of one job.
_MOST_REDRIVES = 100
# A new waiter is seconds behind its cursor, or minutes after a restart; older ends are read again.
_RECENT = 25_000
# Seconds in which further waiters share one reading of the backlog.
_JOIN_DELAY = 0.05

_Item = TypeVar("_Item")


class _Source:
    """The ends in one stream: those stored from now on, older ones on request, and the recent ones."""

    def __init__(
        self,
        connection: Connection,
        cursor: Cursor,
        name: str,
        reader: EndReader,
        on_statement: Callable[[_Source, Statement], None],
    ) -> None:
        self.name = name
        self._connection = connection
        self._stream: str = getattr(cursor, name)
        self._subjects, self._read = reader.streams[name]
        self._on_statement = on_statement
        self._created: str | None = None
        # Every end stored from here on has been read or will be.
        self._low: int = getattr(cursor, f"{name}_from")
        # What was read last of each job, and up to which position, in two generations of which the older is dropped as
        # a whole: dropped one by one, they would hold the event loop.
        self._newer: dict[int | str, Statement] = {}
        self._older: dict[int | str, Statement] = {}
        self._last_newer = self._last_older = 0
        self._requests: asyncio.Queue[int] = asyncio.Queue()
        self._tail = StreamTail(
            *(connection, self._stream, self._subjects, self._low, self._take),
            created=getattr(cursor, f"{name}_created") or None,
            on_created=self._note_created,
        )

    async def follow(self) -> None:
        """Read what is stored from now on; see :meth:`StreamTail.run`."""
        await self._tail.run()

    async def read_backlog(self) -> None:
        """Read what :meth:`request_backlog` asks for, in one go for concurrent requests; see :meth:`StreamTail.run`."""
        while True:
            starts = [await self._requests.get()]
            await asyncio.sleep(_JOIN_DELAY)
            starts += [self._requests.get_nowait() for _ in range(self._requests.qsize())]
            start, stop = min(starts), self._low - 1
            try:
                if start <= stop:
                    # Set before reading: a waiter added from here on gets what is read later, and the recent ends.
                    self._low = start
                    await StreamTail(self._connection, self._stream, self._subjects, start, self._take, stop=stop).run()
            finally:
                for _ in starts:
                    self._requests.task_done()

    def start_of(self, cursor: Cursor) -> int:
        """Return a cursor's position in the stream that is read."""
        return cursor.start(self.name, self._created)

    def request_backlog(self, start: int) -> None:
        """Have the ends read that are stored from a sequence on, where they haven't been."""
        if start < self._low:
            self._requests.put_nowait(start)

    def recent(self, waiter: Waiter) -> list[Statement]:
        """Return what was read last of each of a waiter's jobs, from its cursor on."""
        start, report = self.start_of(waiter.cursor), waiter.report
        found: Iterable[Statement | None]
        if report.unsettled_count > len(self._newer) + len(self._older):
            # Of very many jobs, most haven't ended.
            recent = chain(self._older.values(), self._newer.values())
            found = (statement for statement in recent if waiter.is_about(statement))
        else:
            found = map(self.latest, chain(report.unsettled(), waiter.advised))
        return [statement for statement in found if statement is not None and statement.event_sequence >= start]

    def latest(self, key: int | str) -> Statement | None:
        """Return what was read last of a job, where that was lately."""
        return self._newer.get(key) or self._older.get(key)

    async def wait_until_read(self) -> None:
        """Wait until everything stored so far has been read."""
        await self._tail.caught_up.wait()
        await self._requests.join()

    def abandon(self) -> None:
        """Let nobody wait any more for what can't be read."""
        self._tail.caught_up.set()
        while not self._requests.empty():
            self._requests.get_nowait()
            self._requests.task_done()

    def _note_created(self, created: str) -> None:
        if self._created not in (None, created):
            self._newer, self._older, self._last_newer, self._last_older, self._low = {}, {}, 0, 0, 1
        self._created = created

    def _take(self, message: TailedMessage) -> None:
        for statement in self._read(message):
            key = statement.key
            earlier = self.latest(key)
            latest = max(earlier, statement, key=said_most) if earlier else statement
            self._older.pop(key, None)
            self._newer[key] = latest
            self._last_newer = max(self._last_newer, latest.event_sequence)
            if len(self._newer) >= _RECENT:
                self._low = max(self._low, self._last_older + 1)
                self._older, self._newer = self._newer, {}
                self._last_older, self._last_newer = self._last_newer, 0
            self._on_statement(self, statement)


class _AdvisedEnds:
    """The awaited jobs that workers of any make report on the jobs' own advisory subjects, by their digests.

    Anybody who may publish there could report any id. So a report ends only the job that named its subject and has its
    id, and only if it was stored after that job. The job itself is read once for that: a worker reports a job before it
    acknowledges it, so either the job is still stored, with the time to compare, or it is gone, as a finished job is.

    Where two jobs have the same id and subject, a report doesn't say which of them it is about. Then it ends one that
    is gone, and is kept until one is: a worker that reports a job twice must not end the other one.
    """

    def __init__(self, queue: str, is_awaited: Callable[..., bool]) -> None:
        self._queue = queue
        self._is_awaited = is_awaited
        self._sequences: dict[str, set[int]] = {}
        # Of digests that several jobs have had, the reports that ended one of them.
        self._used: dict[str, set[int]] = {}
        self._warned: set[str] = set()

    def add(self, jobs: Mapping[str, int]) -> None:
        """Await reports of jobs: stream sequences by their digests."""
        for digest, sequence in jobs.items():
            sequences = self._sequences.setdefault(digest, set())
            sequences.add(sequence)
            if len(sequences) > 1:
                self._used.setdefault(digest, set())

    def remove(self, jobs: Mapping[str, int]) -> None:
        """Forget the jobs that nobody awaits any more."""
        for digest in jobs:
            if awaited := {job for job in self._sequences.get(digest, ()) if self._is_awaited(job)}:
                self._sequences[digest] = awaited
            else:
                self._sequences.pop(digest, None)
                self._used.pop(digest, None)
                self._warned.discard(digest)

    def candidates(self, report: AdvisoryReport) -> list[int]:
        """Return the awaited jobs that a report may be about, by what is known without reading them."""
        sequences = self._sequences.get(report.digest, ())
        return sorted(sequence for sequence in sequences if self._is_awaited(sequence, report.event_sequence))

    def ended(self, report: AdvisoryReport, stored: Mapping[int, StoredMessage | None]) -> list[int] | None:
        """Return which of its candidates a report ends; ``None`` where that can't be decided yet."""
        # Jobs of higher sequences were stored later than these, whether or not they are gone.
        late = (sequence for sequence, job in stored.items() if job and job.stored_at > report.stored_at)
        later = min(late, default=2**64)
        jobs = [sequence for sequence in stored if sequence < later]
        if (used := self._used.get(report.digest)) is None:
            return jobs
        if report.event_sequence in used:
            return []
        # An earlier report, read together with this one, may have ended some of them.
        awaited = [sequence for sequence in jobs if self._is_awaited(sequence)]
        ended = [sequence for sequence in awaited if not stored[sequence]][:1]
        if ended or not awaited:
            used.add(report.event_sequence)
            return ended
        if report.digest not in self._warned:
            self._warned.add(report.digest)
            log.warning(
                "Jobs %s of %s have or had an id and advisory subject in common: a report there ends one of them when"
                " it is gone",
                *(", ".join(map(str, awaited)), self._queue),
            )
        return None


# An end, and the source that has it.
_Found: TypeAlias = tuple[_Source, JobEnd]


class EndFollower:
    """Reads the ends of a queue's jobs and gives each to the waiters of its job.

    :param cursor: the first waiter's
    :ivar waiter_count: how many use it
    """

    def __init__(self, connection: Connection, cursor: Cursor) -> None:
        self._connection = connection
        self._cursor = cursor
        self._awaited = AwaitedJobs()
        reader = EndReader(cursor, connection.domain)
        source = partial(_Source, connection, cursor)
        self._events = source("events", reader, self._on_statement)
        self._deaths = source("dead_letters", reader, self._on_statement) if cursor.dead_letters else None
        self._audit = source("audit", reader, self._on_record) if cursor.audit else None
        # What can't be decided without reading more.
        self._claims: asyncio.Queue[_Found] = asyncio.Queue()
        self._deaths_found: asyncio.Queue[_Found] = asyncio.Queue()
        self._reports: asyncio.Queue[AdvisoryReport] = asyncio.Queue()
        self._unconfirmed: asyncio.Queue[Waiter] = asyncio.Queue()
        self._confirming: set[Waiter] = set()
        self._advised = _AdvisedEnds(cursor.queue, self._is_awaited)
        self._consumers = QueueConsumers(connection, cursor)
        self._comparison = Comparison(
            *(connection, cursor, self._awaited, self._consumers),
            *(self._dispatch_compared, self._wait_until_read),
        )
        self._tasks: list[asyncio.Task[None]] = []
        # By the wait for the new job of a redriven one, where that job is in another queue.
        self._elsewhere: dict[SuccessorWaiter, asyncio.Task[None]] = {}
        self.waiter_count = 0

    @property
    def has_failed(self) -> bool:
        """Whether a task of it has ended, so that new waiters need another follower."""
        return any(task.done() for task in self._tasks)

    def start(self) -> None:
        """Start the tasks that read and decide."""
        self._run(self._decide, self._claims, self._decide_claims)
        self._run(self._decide, self._deaths_found, self._decide_deaths)
        self._run(self._decide, self._reports, self._decide_reports)
        self._run(self._decide, self._unconfirmed, self._confirm)
        self._run(self._comparison.run)
        self._run(self._comparison.check_on_request)
        for source in self._sources():
            for reading in (source.follow, source.read_backlog):
                self._run(self._read_audit, reading) if source is self._audit else self._run(reading)

    def _run(self, work: Callable[..., Awaitable[None]], *arguments: object) -> None:
        async def run() -> None:
            # Called in here: of a task that is cancelled before it starts, nothing is left that was never awaited.
            await work(*arguments)

        task = asyncio.create_task(run(), name=work.__qualname__)
        task.add_done_callback(self._on_task_end)
        self._tasks.append(task)

    async def stop(self) -> None:
        """Cancel the tasks that read and decide."""
        for task in self._tasks:
            task.remove_done_callback(self._on_task_end)
        tasks = [*self._tasks, *self._elsewhere.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            error = task.exception() or RuntimeError(f"{task.get_name()} ended by itself")
            for waiter in self._awaited.waiters() | self._confirming:
                waiter.fail(error)

    def add(self, waiter: Waiter) -> None:
        """Give the ends of its jobs to a waiter, those stored since its cursor included."""
        report, advised = waiter.report, waiter.advised
        self._awaited.add(waiter)
        self._advised.add(advised)
        if len(advised) < report.unsettled_count or not set(advised.values()).issuperset(report.unsettled()):
            self._comparison.request_check()
        for source in self._sources():
            for statement in source.recent(waiter):
                (self._on_record if source is self._audit else self._on_statement)(source, statement)
            source.request_backlog(source.start_of(waiter.cursor))

    def remove(self, waiter: Waiter) -> None:
        """Give no more ends to a waiter."""
        self._awaited.remove(waiter)
        self._advised.remove(waiter.advised)
        for job in waiter.redriven.values():
            self.remove(job)
            if task := self._elsewhere.pop(job, None):
                task.cancel()

    def unsampled_since(self, moment: float) -> dict[str, str]:
        """By consumer, why the server didn't report each of its acknowledgements at any time since a moment."""
        return self._consumers.unsampled_since(moment)

    async def confirm(self, waiter: Waiter) -> None:
        """Return if the ends that a waiter has are those of jobs in its cursor's stream, not in another of that name.

        :raises QueueGoneError: they may be those of other jobs
        :raises UnreachableError: the connection was closed
        """
        if waiter.report.last_end_at is not None:
            waiter.confirmed = asyncio.get_running_loop().create_future()
            self._unconfirmed.put_nowait(waiter)
            self._confirming.add(waiter)
            try:
                await waiter.confirmed
            finally:
                self._confirming.remove(waiter)

    async def read_stored(self) -> None:
        """Wait until the waiters have the ends that are stored by now."""
        await self._wait_until_read()
        await self._deaths_found.join()

    def _sources(self) -> Iterable[_Source]:
        return filter(None, (self._events, self._deaths, self._audit))

    def _is_awaited(self, sequence: int, event_sequence: int = 2**64) -> bool:
        waiters = self._awaited.waiters_of(sequence)
        return any(self._events.start_of(waiter.cursor) <= event_sequence for waiter in waiters)

    def _on_statement(self, source: _Source, statement: Statement) -> None:
        if isinstance(statement, AdvisoryReport):
            if self._advised.candidates(statement):
                self._reports.put_nowait(statement)
        elif statement.sequence not in self._awaited:
            return
        elif statement.kind is EndKind.DEAD:
            self._deaths_found.put_nowait((source, statement))
        elif self._consumers.is_only(statement.consumer) and self._claims.empty():
            self._dispatch(statement, source)
        else:
            self._claims.put_nowait((source, statement))

    def _on_record(self, source: _Source, end: Statement) -> None:
        if not isinstance(end, JobEnd):
            return
        if end.successor:
            for waiter in self._awaited.waiters_of(end.sequence):
                if end.event_sequence >= source.start_of(waiter.cursor):
                    self._follow(waiter, end, end.successor)
        elif not end.is_alive and not end.is_report and end.sequence in self._awaited:
            # Something else may be recorded of the job behind it.
            self._deaths_found.put_nowait((source, end))

    async def _decide(
        self, waiting: asyncio.Queue[_Item], decide: Callable[[Sequence[_Item]], Awaitable[None]]
    ) -> None:
        """Decide what waits for it, many at once, without end."""
        while True:
            items = [await waiting.get()]
            items += [waiting.get_nowait() for _ in range(min(waiting.qsize(), MAX_CONCURRENT - 1))]
            while True:
                try:
                    await decide(items)
                    break
                except (TransientError, ApiError) as error:
                    await self._pause(error)
            for _ in items:
                waiting.task_done()

    async def _pause(self, error: JetStreamProviderError) -> None:
        """Wait before the next try of what failed; raises the error where the connection was closed."""
        if self._connection.is_closed:
            raise error
        log.warning("Reading what ended jobs of %s need failed, trying again: %s", self._cursor.queue, error)
        await asyncio.sleep(_RETRY_PAUSE)

    async def _confirm(self, waiters: Sequence[Waiter]) -> None:
        created = self._cursor.created
        # Without a stream there is no other one either, whose jobs could have ended.
        with suppress(NotFoundError):
            created = (await stream_info(self._connection, self._cursor.queue))["created"]
        for waiter in waiters:
            last_end_at, confirmed = waiter.report.last_end_at, waiter.confirmed
            if created != self._cursor.created and last_end_at and last_end_at >= datetime.fromisoformat(created):
                waiter.fail(other_stream(self._cursor, created))
            elif confirmed and not confirmed.done():
                confirmed.set_result(None)

    async def _decide_claims(self, found: Sequence[_Found]) -> None:
        for source, end in await self._believed(found):
            self._dispatch(end, source)

    async def _decide_deaths(self, found: Sequence[_Found]) -> None:
        # A completion of the job may be stored too, and a waiter that starts late must not report it dead.
        await self._wait_until_read(self._events, self._audit)
        completed = await map_concurrently(self._is_completed, [end for _, end in found])
        uncompleted = [death for death, is_completed in zip(found, completed, strict=True) if not is_completed]
        for source, end in await self._believed(uncompleted):
            if not is_superseded(end, self._recorded(end.sequence), is_record=source.name == "audit"):
                self._dispatch(end, source)

    def _recorded(self, sequence: int) -> JobEnd | None:
        """Return what the audit says last of a job, where that was read lately."""
        latest = self._audit.latest(sequence) if self._audit else None
        return latest if isinstance(latest, JobEnd) else None

    async def _is_completed(self, end: JobEnd) -> bool:
        if not end.consumer:
            return False
        subject = completion_subject(self._cursor.queue, end.consumer, end.sequence)
        last = await last_message(self._connection, self._cursor.events, subject)
        if last is None or last.stored_at < datetime.fromisoformat(self._cursor.created):
            return False
        # Then the reader of the events stream dispatches the completion. One from before a wait's cursor is that of an
        # earlier job of the sequence.
        return self._is_awaited(end.sequence, last.sequence)

    async def _believed(self, found: Sequence[_Found]) -> list[_Found]:
        """Return the ends of consumers that may have had the job; what the audit says needs no consumer."""
        claims = [(end.consumer, end.sequence) for source, end in found if end.consumer and source.name != "audit"]
        believed = dict(zip(claims, await self._consumers.may_have_had(claims), strict=True)) if claims else {}
        for claim in (claim for claim, is_believed in believed.items() if not is_believed):
            log.warning(
                "What consumer %s of %s states about job %d doesn't count: its filters don't match the job",
                *(claim[0], self._cursor.queue, claim[1]),
            )
        return [
            (source, end)
            for source, end in found
            if source.name == "audit" or believed.get((end.consumer, end.sequence), True)
        ]

    async def _decide_reports(self, reports: Sequence[AdvisoryReport]) -> None:
        jobs = [self._advised.candidates(report) for report in reports]
        sequences = sorted({sequence for of_report in jobs for sequence in of_report})
        stored: dict[int, StoredMessage | None] = dict.fromkeys(sequences)
        with suppress(NotFoundError):
            stored.update(zip(sequences, await read_jobs(self._connection, self._cursor.queue, sequences), strict=True))
        for report, of_report in zip(reports, jobs, strict=True):
            ended = self._advised.ended(report, {sequence: stored[sequence] for sequence in of_report})
            if ended is None:
                asyncio.get_running_loop().call_later(_RETRY_PAUSE, self._on_statement, self._events, report)
            for sequence in ended or ():
                end = JobEnd(EndKind.COMPLETED, sequence, report.event_sequence, stored_at=report.stored_at)
                self._dispatch(end, self._events)

    def _follow(self, waiter: Waiter, end: JobEnd, successor: Successor) -> None:
        """Await the new job of a redriven one in its place."""
        known = waiter.redriven.get(end.sequence)
        if known and end.event_sequence <= known.record:
            return
        if isinstance(waiter, SuccessorWaiter) and waiter.depth >= _MOST_REDRIVES:
            # Forged records could lead from queue to queue for ever.
            waiter.record_end(end._replace(note=f"{end.note}, and is followed no further", successor=None))
            return
        if known:
            self.remove(known)
        job = SuccessorWaiter(waiter, end.sequence, waiter.cursor, successor, end.event_sequence)
        if not waiter.redriven:
            waiter.redriven = {}
        waiter.redriven[end.sequence] = job
        if successor.stream == self._cursor.queue:
            self.add(job)
        else:
            self._elsewhere[job] = task = asyncio.create_task(self._await_elsewhere(job, end))
            task.add_done_callback(partial(self._on_elsewhere_end, job))

    async def _await_elsewhere(self, job: SuccessorWaiter, end: JobEnd) -> None:
        """Await the new job of a redriven one in another queue, until the wait is over."""
        waiter, stream = job.origin, job.successor.stream
        while True:
            try:
                queue = await discover_queue(self._connection, stream)
                cursor = (await take_cursor(self._connection, queue)).from_start()
                if datetime.fromisoformat(cursor.created) > end.stored_at:
                    raise QueueGoneError(f"{stream} was deleted and created anew since")
                break
            except TransientError as error:
                if self._connection.is_closed:
                    return
                await self._pause(error)
            except JetStreamProviderError as error:
                note = f"{end.note}, whose end can't be known: {error}"
                log.warning("Job %d of %s: %s", end.sequence, self._cursor.queue, note)
                waiter.record_end(end._replace(note=note, successor=None))
                return
        job.cursor = cursor
        async with shared_follower(self._connection, cursor) as follower:
            follower.add(job)
            try:
                await asyncio.wait([job.finished])
            finally:
                follower.remove(job)

    def _on_elsewhere_end(self, job: SuccessorWaiter, task: asyncio.Task[None]) -> None:
        self._elsewhere.pop(job, None)
        if not task.cancelled() and (error := task.exception()):
            job.fail(error)

    async def _read_audit(self, reading: Callable[[], Awaitable[None]]) -> None:
        """Read the audit as long as that is possible; without it, redriven jobs are gone without evidence."""
        try:
            await reading()
        except (NotFoundError, ApiError, PermissionDeniedError) as error:
            if audit := self._audit:
                log.warning(UNKNOWN_REDRIVES, self._cursor.queue, error)
                self._audit = None
                audit.abandon()
            # As a task that ends would end all waits.
            await asyncio.Event().wait()

    async def _wait_until_read(self, *sources: _Source | None) -> None:
        for source in sources or self._sources():
            if source:
                await source.wait_until_read()
        await self._claims.join()

    def _dispatch_compared(self, end: JobEnd) -> None:
        recorded = self._recorded(end.sequence) if end.kind is EndKind.UNACCOUNTED else None
        self._dispatch(recorded if recorded and not recorded.is_alive else end, None)

    def _dispatch(self, end: JobEnd, source: _Source | None) -> None:
        for waiter in self._awaited.waiters_of(end.sequence):
            if source and end.event_sequence < source.start_of(waiter.cursor):
                continue
            # Of a redriven job, its new job says how it ends.
            if end.is_final or end.sequence not in waiter.redriven:
                waiter.record_end(end)
            if end.is_final:
                self._drop(end.sequence, waiter)

    def _drop(self, sequence: int, waiter: Waiter) -> None:
        self._awaited.drop(sequence, waiter)
        if isinstance(waiter, SuccessorWaiter):
            self._drop(waiter.sequence, waiter.origin)


_followers: WeakKeyDictionary[Connection, dict[tuple[str | None, ...], EndFollower]] = WeakKeyDictionary()


class shared_follower:  # noqa: N801 - used as a function, and no generator: there is one for each wait
    """Use a connection's one follower of a queue, in an ``async with``; it stops with its last waiter."""

    __slots__ = ("_connection", "_cursor", "_follower")

    def __init__(self, connection: Connection, cursor: Cursor) -> None:
        self._connection = connection
        self._cursor = cursor

    async def __aenter__(self) -> EndFollower:
        """Begin to use it."""
        followers = _followers.setdefault(self._connection, {})
        follower = followers.get(key := _key(self._cursor))
        if follower is None or follower.has_failed:
            follower = followers[key] = EndFollower(self._connection, self._cursor)
            follower.start()
        follower.waiter_count += 1
        self._follower = follower
        return follower

    async def __aexit__(self, *_: object) -> None:
        """End using it."""
        self._follower.waiter_count -= 1
        if not self._follower.waiter_count:
            followers, key = _followers.get(self._connection, {}), _key(self._cursor)
            if followers.get(key) is self._follower:
                del followers[key]
            await self._follower.stop()


def _key(cursor: Cursor) -> tuple[str | None, ...]:
    return (cursor.queue, cursor.created, cursor.events, cursor.dead_letters, cursor.audit, *cursor.advisory_subjects)
