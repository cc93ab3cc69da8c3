"""The one follower of a queue's ends, shared by all waits of a connection.

It reads what the companions of the queue say about ends (:class:`EndSource`, one for each stream), reads the facts that
an end needs to count, decides, and gives each end to the waits for its job:

- what a worker states counts where its consumer may have had the job;
- a death counts where no completion is stored and the audit doesn't know more of the job, once all of it is read;
- a report on an advisory subject counts by :class:`AdvisoryEnds`;
- for the new job of a redriven one, the follower of its queue is used in turn.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from airflow_provider_jetstream.jetstream.client.concurrency import MAX_CONCURRENT, map_concurrently
from airflow_provider_jetstream.jetstream.client.message_reader import get_message, last_message
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.stream_tail import StreamTail
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
from airflow_provider_jetstream.jetstream.waiting.comparison import Comparison, other_stream
from airflow_provider_jetstream.jetstream.waiting.consumers import QueueConsumers
from airflow_provider_jetstream.jetstream.waiting.cursor import UNKNOWN_REDRIVES, take_cursor
from airflow_provider_jetstream.jetstream.waiting.ends import (
    REPORTED,
    AdvisoryReport,
    EndKind,
    EndReader,
    JobEnd,
    said_most,
)
from airflow_provider_jetstream.jetstream.waiting.waiter import AwaitedJobs, SuccessorWaiter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
    from typing import Any

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
_AUDIT = "audit"

_Key = TypeVar("_Key")
_Event = TypeVar("_Event")
_Item = TypeVar("_Item")


class RecentEvents(Generic[_Key, _Event]):
    """The events that were read last, one for each key, in two generations of which the older is dropped as a whole.

    Dropping them one by one holds the event loop: a dict looks for its first entry among all that were removed before
    it, and an ordered one takes 20 ms whenever it grows.

    :param generation: how many events a generation has; so many are kept at least
    :ivar dropped_upto: the last position in the stream of the events that were dropped
    """

    def __init__(self, generation: int) -> None:
        self.dropped_upto = 0
        self._generation = generation
        self._newer: dict[_Key, _Event] = {}
        self._older: dict[_Key, _Event] = {}
        self._last_newer = self._last_older = 0

    def get(self, key: _Key) -> _Event | None:
        """Return the event of a key, where it was read lately."""
        event = self._newer.get(key)
        return self._older.get(key) if event is None else event

    def put(self, key: _Key, event: _Event, position: int) -> None:
        """Note the event of a key in the place of an earlier one.

        :param position: its sequence in the stream
        """
        self._older.pop(key, None)
        self._newer[key] = event
        self._last_newer = max(self._last_newer, position)
        if len(self._newer) >= self._generation:
            self.dropped_upto = max(self.dropped_upto, self._last_older)
            self._older, self._newer = self._newer, {}
            self._last_older, self._last_newer = self._last_newer, 0

    def values(self) -> Iterator[_Event]:
        """Yield the events."""
        return chain(self._older.values(), self._newer.values())

    def clear(self) -> None:
        """Forget all events, as where their stream was created anew."""
        self._newer, self._older = {}, {}
        self._last_newer = self._last_older = self.dropped_upto = 0

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)


class EndSource:
    """The ends of a queue's jobs in one stream: a follower, a reader of older ones, and the ends read recently.

    :param cursor: the first waiter's
    :param name: of the stream among those of the cursor
    :param subjects: the subjects of the ends
    :param read: returns what a message says
    :param on_statement: called with each statement as it is read
    :ivar is_audit: whether it is the audit
    """

    def __init__(
        self,
        connection: Connection,
        cursor: Cursor,
        name: str,
        subjects: tuple[str, ...],
        read: Callable[[TailedMessage], Iterable[Statement]],
        on_statement: Callable[[EndSource, Statement], None],
    ) -> None:
        self._connection = connection
        self.is_audit = name == _AUDIT
        self._stream: str = getattr(cursor, name)
        self._position: attrgetter[tuple[int, str]] = attrgetter(f"{name}_from", f"{name}_created")
        self._subjects = subjects
        self._read = read
        self._on_statement = on_statement
        # By the job's sequence, and by its digest.
        self._recent: RecentEvents[int | str, Statement] = RecentEvents(_RECENT)
        # Every end stored from here on has been read or will be.
        self._low, created = self._position(cursor)
        self._backlog_start: int | None = None
        self._backlog_requested = asyncio.Event()
        self._backlog_read = asyncio.Event()
        self._backlog_read.set()
        self._stream_created: str | None = None
        self._tail = StreamTail(
            *(connection, self._stream, subjects, self._low, self._take),
            created=created or None,
            on_created=self._note_created,
        )

    async def follow(self) -> None:
        """Read what is stored from now on; see :meth:`StreamTail.run`."""
        await self._tail.run()

    async def read_backlog(self) -> None:
        """Read what :meth:`request_backlog` asks for, in one go for concurrent requests; see :meth:`StreamTail.run`."""
        while True:
            await self._backlog_requested.wait()
            await asyncio.sleep(_JOIN_DELAY)
            self._backlog_requested.clear()
            start, stop, self._backlog_start = self._backlog_start, self._low - 1, None
            if start is not None and start <= stop:
                # Set before reading: a waiter added from here on gets what is read later, and the recent ends.
                self._low = start
                await StreamTail(self._connection, self._stream, self._subjects, start, self._take, stop=stop).run()
            if not self._backlog_requested.is_set():
                self._backlog_read.set()

    def start_of(self, cursor: Cursor) -> int:
        """Return a cursor's position in the stream that is read: its beginning, where it was created anew since."""
        start, created = self._position(cursor)
        return 1 if created and self._stream_created not in (None, created) else start

    def abandon(self) -> None:
        """Let nobody wait any more for what can't be read."""
        self._tail.caught_up.set()
        self._backlog_read.set()

    def _note_created(self, created: str) -> None:
        if self._stream_created not in (None, created):
            self._recent.clear()
            self._low = 1
        self._stream_created = created

    def request_backlog(self, start: int) -> None:
        """Have the ends read that are stored from a sequence on, where they haven't been."""
        if start >= self._low:
            return
        self._backlog_start = min(start, self._low if self._backlog_start is None else self._backlog_start)
        self._backlog_read.clear()
        self._backlog_requested.set()

    def recent(self, waiter: Waiter) -> list[Statement]:
        """Return what was read last of each of a waiter's jobs, from its cursor on."""
        start, report = self.start_of(waiter.cursor), waiter.report
        if report.unsettled_count > len(self._recent):
            # Of very many jobs, most haven't ended.
            return [
                found
                for found in self._recent.values()
                if found.event_sequence >= start
                and (report.is_unsettled(found.key) if isinstance(found, JobEnd) else found.key in waiter.advised)
            ]
        keys: Iterator[int | str] = chain(report.unsettled(), waiter.advised)
        statements = map(self._recent.get, keys)
        return [found for found in statements if found is not None and found.event_sequence >= start]

    def latest(self, sequence: int) -> JobEnd | None:
        """Return what was read last of a job, where that was lately."""
        found = self._recent.get(sequence)
        return found if isinstance(found, JobEnd) else None

    async def wait_until_read(self) -> None:
        """Wait until everything stored so far has been read."""
        await self._tail.caught_up.wait()
        await self._backlog_read.wait()

    def _take(self, message: TailedMessage) -> None:
        for statement in self._read(message):
            latest = statement
            if earlier := self._recent.get(statement.key):
                latest = max(earlier, statement, key=said_most)
            self._recent.put(statement.key, latest, latest.event_sequence)
            self._low = max(self._low, self._recent.dropped_upto + 1)
            self._on_statement(self, statement)


class AdvisoryEnds:
    """The awaited jobs that workers of any make report on the jobs' own advisory subjects, by their digests.

    Anybody who may publish there could report any id. So a report ends only the job that named its subject and has its
    id, and only if it was stored after that job. The job itself is read once for that: a worker reports a job before it
    acknowledges it, so either the job is still stored, with the time to compare, or it is gone, as a finished job is.

    Where two jobs have the same id and subject, a report doesn't say which of them it is about. Then it ends one that
    is gone, and is kept until one is: a worker that reports a job twice must not end the other one.

    :param queue: the work queue
    :param is_awaited: returns whether a job is awaited, by its stream sequence; with the sequence of an event, whether
        any wait for it began before that
    """

    def __init__(self, queue: str, is_awaited: Callable[..., bool]) -> None:
        self._queue = queue
        self._is_awaited = is_awaited
        self._sequences: dict[str, set[int]] = {}
        # Digests that several jobs have had, with the reports that ended one of them.
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
        """Forget those of the jobs that nobody awaits any more."""
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
        """Return the jobs that a report ends; ``None`` where it isn't decided yet.

        :param stored: its candidates in order, as the queue stores them
        """
        # Jobs of higher sequences were stored later than these, whether or not they are gone.
        late = (sequence for sequence, job in stored.items() if job and job.stored_at > report.stored_at)
        later = min(late, default=None)
        jobs = [sequence for sequence in stored if later is None or sequence < later]
        used = self._used.get(report.digest)
        if used is None:
            return jobs
        if report.event_sequence in used:
            return []
        # An earlier report, read together with this one, may have ended some of them.
        awaited = [sequence for sequence in jobs if self._is_awaited(sequence)]
        ended = [sequence for sequence in awaited if not stored[sequence]][:1]
        if awaited and not ended:
            self._warn_once(report.digest, awaited)
            return None
        used.add(report.event_sequence)
        return ended

    def _warn_once(self, digest: str, sequences: Iterable[int]) -> None:
        if digest not in self._warned:
            self._warned.add(digest)
            log.warning(
                "Jobs %s of %s have or had an id and advisory subject in common: a report there ends one of them when"
                " it is gone",
                ", ".join(map(str, sequences)),
                self._queue,
            )


class _SharedAnswer:
    """The answer to a request that concurrent callers share, sent after each of them called."""

    def __init__(self, request: Callable[[], Coroutine[Any, Any, str | None]]) -> None:
        self._request = request
        self._running: asyncio.Task[str | None] | None = None
        self._next: asyncio.Task[str | None] | None = None

    async def get(self) -> str | None:
        if self._next is None:
            self._next = asyncio.create_task(self._after(self._running))
        # Shielded: a caller that is cancelled must not cancel the request of the others.
        return await asyncio.shield(self._next)

    async def _after(self, running: asyncio.Task[str | None] | None) -> str | None:
        if running is not None:
            await asyncio.wait([running])
        # Who comes from here on may know what happened later.
        self._running, self._next = self._next, None
        return await self._request()


# An end, and the source that has it.
_Found: TypeAlias = tuple[EndSource, JobEnd]


class EndFollower:
    """Reads the ends of a queue's jobs and gives each to the waiters of its job.

    :param cursor: the first waiter's
    :ivar waiter_count: how many use it
    """

    def __init__(self, connection: Connection, cursor: Cursor) -> None:
        self._connection = connection
        self._cursor = cursor
        self._awaited = AwaitedJobs()
        reader = EndReader(connection, cursor)
        source = partial(EndSource, connection, cursor)
        self._events = source("events", reader.events, reader.read_event, self._on_statement)
        self._deaths = self._audit = None
        if cursor.dead_letters:
            self._deaths = source("dead_letters", reader.deaths, reader.read_death, self._on_statement)
        if cursor.audit:
            self._audit = source(_AUDIT, reader.records, reader.read_record, self._on_record)
        # What can't be decided without reading more.
        self._claims: asyncio.Queue[_Found] = asyncio.Queue()
        self._deaths_found: asyncio.Queue[_Found] = asyncio.Queue()
        self._reports: asyncio.Queue[AdvisoryReport] = asyncio.Queue()
        self._advised = AdvisoryEnds(cursor.queue, self._is_awaited)
        self._consumers = QueueConsumers(connection, cursor)
        self._stream_now = _SharedAnswer(self._read_created)
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
        coroutines: list[Coroutine[Any, Any, None]] = [
            self._decide(self._claims, self._decide_claims),
            self._decide(self._deaths_found, self._decide_deaths),
            self._decide(self._reports, self._decide_reports),
            self._comparison.run(),
            self._consumers.run(),
        ]
        for source in self._sources():
            readings = (source.follow(), source.read_backlog())
            coroutines += map(self._read_audit, readings) if source.is_audit else readings
        for coroutine in coroutines:
            task = asyncio.create_task(coroutine)
            task.add_done_callback(self._on_task_end)
            self._tasks.append(task)

    async def stop(self) -> None:
        """Cancel the tasks that read and decide."""
        for task in self._tasks:
            task.remove_done_callback(self._on_task_end)
            task.cancel()
        for task in self._elsewhere.values():
            task.cancel()
        await asyncio.gather(*self._tasks, *self._elsewhere.values(), return_exceptions=True)

    def add(self, waiter: Waiter) -> None:
        """Give the ends of its jobs to a waiter, those stored since its cursor included."""
        report = waiter.report
        self._awaited.add(waiter)
        self._advised.add(waiter.advised)
        is_fewer = len(waiter.advised) < report.unsettled_count
        if is_fewer or not set(waiter.advised.values()).issuperset(report.unsettled()):
            self._consumers.request()
        for source in self._sources():
            for statement in source.recent(waiter):
                (self._on_record if source.is_audit else self._on_statement)(source, statement)
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
        if (last_end_at := waiter.report.last_end_at) is None:
            return
        created = await self._stream_now.get()
        if created not in (None, self._cursor.created) and last_end_at >= datetime.fromisoformat(str(created)):
            raise other_stream(self._cursor, str(created))

    async def read_stored(self) -> None:
        """Wait until the waiters have the ends that are stored by now."""
        await self._wait_until_read()
        await self._deaths_found.join()

    async def _read_created(self) -> str | None:
        while True:
            try:
                return str((await stream_info(self._connection, self._cursor.queue))["created"])
            except NotFoundError:
                # There is no other stream either, whose jobs could have ended.
                return None
            except (TransientError, ApiError) as error:
                await self._pause(error)

    async def _pause(self, error: JetStreamProviderError) -> None:
        """Wait before the next try of what failed.

        :raises JetStreamProviderError: the error, where the connection was closed
        """
        if self._connection.is_closed:
            raise error
        log.warning("Reading what ended jobs of %s need failed, trying again: %s", self._cursor.queue, error)
        await asyncio.sleep(_RETRY_PAUSE)

    def _sources(self) -> Iterator[EndSource]:
        for source in (self._events, self._deaths, self._audit):
            if source:
                yield source

    def _is_awaited(self, sequence: int, event_sequence: int = 2**64) -> bool:
        waiters = self._awaited.waiters_of(sequence)
        return any(self._events.start_of(waiter.cursor) <= event_sequence for waiter in waiters)

    def _on_statement(self, source: EndSource, statement: Statement) -> None:
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

    def _on_record(self, source: EndSource, end: Statement) -> None:
        if not isinstance(end, JobEnd):
            return
        if end.successor:
            for waiter in self._awaited.waiters_of(end.sequence):
                if end.event_sequence >= source.start_of(waiter.cursor):
                    self._follow(waiter, end, end.successor)
        elif not end.is_alive and end.note != REPORTED and end.sequence in self._awaited:
            # Something else may be recorded of the job behind it.
            self._deaths_found.put_nowait((source, end))

    async def _decide(
        self, waiting: asyncio.Queue[_Item], decide: Callable[[Sequence[_Item]], Awaitable[None]]
    ) -> None:
        """Decide what waits for it, many at once, without end."""
        while True:
            items = [await waiting.get()]
            while len(items) < MAX_CONCURRENT and not waiting.empty():
                items.append(waiting.get_nowait())
            while True:
                try:
                    await decide(items)
                    break
                except (TransientError, ApiError) as error:
                    await self._pause(error)
            for _ in items:
                waiting.task_done()

    async def _decide_claims(self, found: Sequence[_Found]) -> None:
        for source, end in await self._believed(found):
            self._dispatch(end, source)

    async def _decide_deaths(self, found: Sequence[_Found]) -> None:
        # A completion of the job may be stored too, and a waiter that starts late must not report it dead.
        await self._events.wait_until_read()
        await self._claims.join()
        if self._audit:
            await self._audit.wait_until_read()
        completed = await map_concurrently(self._is_completed, [end for _, end in found])
        uncompleted = [death for death, is_completed in zip(found, completed, strict=True) if not is_completed]
        for source, end in await self._believed(uncompleted):
            if not self._is_superseded(source, end):
                self._dispatch(end, source)

    async def _believed(self, found: Sequence[_Found]) -> list[_Found]:
        """Return the ends of consumers that may have had the job; what the audit says needs no consumer."""
        claims = [(end.consumer, end.sequence) for source, end in found if end.consumer and not source.is_audit]
        believed = dict(zip(claims, await self._consumers.may_have_had(claims), strict=True)) if claims else {}
        for consumer, sequence in (claim for claim, is_believed in believed.items() if not is_believed):
            log.warning(
                "What consumer %s of %s states about job %d doesn't count: its filters don't match the job",
                *(consumer, self._cursor.queue, sequence),
            )
        return [
            (source, end)
            for source, end in found
            if source.is_audit or believed.get((end.consumer, end.sequence), True)
        ]

    async def _decide_reports(self, reports: Sequence[AdvisoryReport]) -> None:
        jobs = [self._advised.candidates(report) for report in reports]
        sequences = sorted({sequence for of_report in jobs for sequence in of_report})
        stored = dict(zip(sequences, await map_concurrently(self._job, sequences), strict=True))
        for report, of_report in zip(reports, jobs, strict=True):
            ended = self._advised.ended(report, {sequence: stored[sequence] for sequence in of_report})
            if ended is None:
                loop = asyncio.get_running_loop()
                loop.call_later(_RETRY_PAUSE, self._on_statement, self._events, report)
            for sequence in ended or ():
                end = JobEnd(EndKind.COMPLETED, sequence, report.event_sequence, stored_at=report.stored_at)
                self._dispatch(end, self._events)

    async def _job(self, sequence: int) -> StoredMessage | None:
        try:
            return await get_message(self._connection, self._cursor.queue, sequence)
        except NotFoundError:
            return None

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
        waiter.note_redriven(job)
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

    async def _read_audit(self, reading: Coroutine[Any, Any, None]) -> None:
        """Read the audit as long as that is possible; without it, redriven jobs are gone without evidence."""
        try:
            await reading
        except (NotFoundError, ApiError, PermissionDeniedError) as error:
            if audit := self._audit:
                log.warning(UNKNOWN_REDRIVES, self._cursor.queue, error)
                self._audit = None
                audit.abandon()
            # As a task that ends would end all waits.
            await asyncio.Event().wait()

    async def _wait_until_read(self) -> None:
        for source in self._sources():
            await source.wait_until_read()
        await self._claims.join()

    def _dispatch_compared(self, end: JobEnd) -> None:
        latest = self._audit.latest(end.sequence) if self._audit and end.kind is EndKind.UNACCOUNTED else None
        self._dispatch(latest if latest and not latest.is_alive else end, None)

    def _dispatch(self, end: JobEnd, source: EndSource | None) -> None:
        for waiter in self._awaited.waiters_of(end.sequence):
            if source and end.event_sequence < source.start_of(waiter.cursor):
                continue
            is_final = end.kind in (EndKind.COMPLETED, EndKind.CANCELLED)
            if not is_final and end.sequence in waiter.redriven:
                # Its new job says how it ends.
                continue
            waiter.record_end(end)
            if is_final:
                self._drop(end.sequence, waiter)

    def _drop(self, sequence: int, waiter: Waiter) -> None:
        self._awaited.drop(sequence, waiter)
        if isinstance(waiter, SuccessorWaiter):
            self._drop(waiter.sequence, waiter.origin)

    def _is_superseded(self, source: EndSource, end: JobEnd) -> bool:
        """Return whether the audit knows more of a dead job: that it was redriven, requeued or parked since."""
        latest = self._audit.latest(end.sequence) if self._audit else None
        if latest is None or latest.note == REPORTED:
            return False
        if source is self._audit:
            return latest.event_sequence > end.event_sequence
        return latest.stored_at >= end.stored_at

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

    def _on_elsewhere_end(self, job: SuccessorWaiter, task: asyncio.Task[None]) -> None:
        self._elsewhere.pop(job, None)
        if not task.cancelled() and (error := task.exception()) and not job.finished.done():
            job.finished.set_exception(error)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        if (error := task.exception()) is None:
            error = RuntimeError(f"{task.get_coro()} ended by itself")
        for waiter in self._awaited.waiters():
            if not waiter.finished.done():
                waiter.finished.set_exception(error)


_followers: WeakKeyDictionary[Connection, dict[tuple[str | None, ...], EndFollower]] = WeakKeyDictionary()


class SharedFollower:
    """Uses a follower while the block runs; see :func:`shared_follower`."""

    # Not a generator: there is one for each wait.
    __slots__ = ("_connection", "_cursor", "_follower")

    def __init__(self, connection: Connection, cursor: Cursor) -> None:
        self._connection = connection
        self._cursor = cursor
        self._follower: EndFollower | None = None

    async def __aenter__(self) -> EndFollower:
        connection, cursor = self._connection, self._cursor
        followers = _followers.setdefault(connection, {})
        follower = followers.get(key := _key(cursor))
        if follower is None or follower.has_failed:
            follower = followers[key] = EndFollower(connection, cursor)
            follower.start()
        follower.waiter_count += 1
        self._follower = follower
        return follower

    async def __aexit__(self, *_: object) -> None:
        follower, self._follower = self._follower, None
        if follower is None:
            return
        follower.waiter_count -= 1
        if not follower.waiter_count:
            followers, key = _followers.get(self._connection, {}), _key(self._cursor)
            if followers.get(key) is follower:
                del followers[key]
            await follower.stop()


def shared_follower(connection: Connection, cursor: Cursor) -> SharedFollower:
    """Use a connection's one follower of a queue, in an ``async with``; it stops with its last waiter."""
    return SharedFollower(connection, cursor)


def _key(cursor: Cursor) -> tuple[str | None, ...]:
    return (cursor.queue, cursor.created, cursor.events, cursor.dead_letters, cursor.audit, *cursor.advisory_subjects)
