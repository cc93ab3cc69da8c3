"""One reader of the ends of a queue's jobs, shared by all waiters of a connection."""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime
from functools import partial
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
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    JetStreamProviderError,
    NotFoundError,
    PermissionDeniedError,
    QueueGoneError,
    TransientError,
)
from airflow_provider_jetstream.jetstream.queue.discovery import discover_queue
from airflow_provider_jetstream.jetstream.waiting.advisory_ends import AdvisoryEnds
from airflow_provider_jetstream.jetstream.waiting.audit_source import REPORTED, AuditSource
from airflow_provider_jetstream.jetstream.waiting.awaited_jobs import AwaitedJobs
from airflow_provider_jetstream.jetstream.waiting.claimed_ends import ClaimedEnds
from airflow_provider_jetstream.jetstream.waiting.cursor import UNKNOWN_REDRIVES, take_cursor
from airflow_provider_jetstream.jetstream.waiting.end_evidence_check import EndEvidenceCheck
from airflow_provider_jetstream.jetstream.waiting.event_source import EndSource
from airflow_provider_jetstream.jetstream.waiting.job_end import EndKind
from airflow_provider_jetstream.jetstream.waiting.queue_identity import QueueIdentity
from airflow_provider_jetstream.jetstream.waiting.reconciler import Reconciler
from airflow_provider_jetstream.jetstream.waiting.stalls import Stalls
from airflow_provider_jetstream.jetstream.waiting.waiter import SuccessorWaiter

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from typing import Any

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
    from airflow_provider_jetstream.jetstream.waiting.job_end import JobEnd, Successor
    from airflow_provider_jetstream.jetstream.waiting.stalls import Stall
    from airflow_provider_jetstream.jetstream.waiting.waiter import Waiter

log = logging.getLogger(__name__)

_RETRY_PAUSE = 1.0
# Of one job.
_MOST_REDRIVES = 100


class EndDispatcher:
    """Reads the ends of a queue's jobs and dispatches each to the waiters of its job.

    :param cursor: the first waiter's
    """

    def __init__(self, connection: Connection, cursor: Cursor) -> None:
        self._connection = connection
        self._cursor = cursor
        self._awaited = AwaitedJobs()
        completions = (completion_filter(cursor.queue), f"{ACK_METRIC}.{cursor.queue}.*")
        self._advisory_ends = AdvisoryEnds(connection, cursor.queue, self._is_awaited, self._dispatch_advised)
        self._events = EndSource(
            connection,
            cursor.events,
            completions,
            cursor,
            cursor.events_from,
            cursor.events_created,
            self._on_end,
            advisory_subjects=cursor.advisory_subjects,
            on_report=self._advisory_ends.take,
        )
        self._deaths: EndSource | None = None
        if cursor.dead_letters:
            advisories = (f"{MAX_DELIVERIES}.{cursor.queue}.*", f"{TERMINATED}.{cursor.queue}.*")
            self._deaths = EndSource(
                *(connection, cursor.dead_letters, advisories, cursor),
                *(cursor.dead_letters_from, cursor.dead_letters_created, self._on_end),
            )
        self._audit = AuditSource(connection, cursor.audit, cursor, self._on_record) if cursor.audit else None
        self._unconfirmed: asyncio.Queue[tuple[EndSource, JobEnd]] = asyncio.Queue()
        self._claims = ClaimedEnds(connection, cursor, self._on_believed)
        self._evidence = EndEvidenceCheck(connection, cursor, self._claims.consumers.note_consumers)
        self._identity = QueueIdentity(connection, cursor)
        self._stalls = Stalls(cursor.queue)
        self._reconciler = Reconciler(
            connection,
            cursor,
            self._awaited,
            self._dispatch_reconciled,
            self._wait_until_read,
            self._evidence,
            self._identity,
            self._stalls,
            self._dispatch_stalls,
        )
        self._tasks: list[asyncio.Task[None]] = []
        # By the wait for the new job of a redriven one, where that job is in another queue.
        self._elsewhere: dict[SuccessorWaiter, asyncio.Task[None]] = {}
        self.waiter_count = 0

    @property
    def has_failed(self) -> bool:
        """Whether a task of it has ended, so that new waiters need another dispatcher."""
        return any(task.done() for task in self._tasks)

    def start(self) -> None:
        """Start the tasks that read."""
        coroutines: list[Coroutine[Any, Any, None]] = [
            self._confirm_deaths(),
            self._reconciler.run(),
            self._advisory_ends.run(),
            self._evidence.run(),
            self._claims.run(),
        ]
        for source in (self._events, self._deaths):
            coroutines += [source.follow(), source.read_backlog()] if source else ()
        if self._audit:
            coroutines += [self._read_audit(self._audit.follow()), self._read_audit(self._audit.read_backlog())]
        for coroutine in coroutines:
            task = asyncio.create_task(coroutine)
            task.add_done_callback(self._on_task_end)
            self._tasks.append(task)

    async def stop(self) -> None:
        """Cancel the tasks that read."""
        for task in self._tasks:
            task.remove_done_callback(self._on_task_end)
            task.cancel()
        for task in self._elsewhere.values():
            task.cancel()
        await asyncio.gather(*self._tasks, *self._elsewhere.values(), return_exceptions=True)

    def add(self, waiter: Waiter) -> None:
        """Dispatch the ends of its jobs to a waiter, those stored since its cursor included."""
        report = waiter.report
        self._awaited.add(waiter)
        self._advisory_ends.add(waiter.advised)
        is_fewer = len(waiter.advised) < report.unsettled_count
        if is_fewer or not set(waiter.advised.values()).issuperset(report.unsettled()):
            self._evidence.request()
        for source in self._sources():
            start = self._start_of(waiter, source)
            for end in source.recent_ends(report, start):
                (self._on_record if source is self._audit else self._on_end)(source, end)
            for message in source.recent_reports(waiter.advised, start):
                self._advisory_ends.take(message)
            source.request_backlog(start)

    def remove(self, waiter: Waiter) -> None:
        """Dispatch no more ends to a waiter."""
        self._awaited.remove(waiter)
        self._advisory_ends.remove(waiter.advised)
        for job in waiter.redriven.values():
            self.remove(job)
            if task := self._elsewhere.pop(job, None):
                task.cancel()

    def unsampled_since(self, moment: float) -> dict[str, str]:
        """By consumer, why the server didn't report each of its acknowledgements at any time since a moment."""
        return self._evidence.unsampled_since(moment)

    async def confirm(self, waiter: Waiter) -> None:
        """Return if the ends that a waiter has are those of its jobs; see :meth:`QueueIdentity.confirm`."""
        await self._identity.confirm(waiter.report.last_end_at)

    async def read_stored(self) -> None:
        """Wait until the waiters have the ends that are stored by now."""
        await self._wait_until_read()
        await self._unconfirmed.join()

    def _sources(self) -> Iterator[EndSource]:
        yield self._events
        if self._deaths:
            yield self._deaths
        if self._audit:
            yield self._audit

    def _start_of(self, waiter: Waiter, source: EndSource) -> int:
        cursor = waiter.cursor
        if source is self._events:
            return source.start_of(cursor.events_from, cursor.events_created)
        if source is self._audit:
            return source.start_of(cursor.audit_from, cursor.audit_created)
        return source.start_of(cursor.dead_letters_from, cursor.dead_letters_created)

    def _is_awaited(self, sequence: int, event_sequence: int = 2**64) -> bool:
        waiters = self._awaited.waiters_of(sequence)
        return any(self._start_of(waiter, self._events) <= event_sequence for waiter in waiters)

    def _on_end(self, source: EndSource, end: JobEnd) -> None:
        if end.sequence in self._awaited:
            self._claims.take(source, end)

    def _on_believed(self, source: EndSource, end: JobEnd) -> None:
        if end.kind is EndKind.DEAD and end.sequence in self._awaited:
            # A completion of the job may be stored too, and a waiter that starts late must not report it dead.
            self._unconfirmed.put_nowait((source, end))
        elif end.kind is not EndKind.DEAD:
            self._dispatch(end, source)

    def _on_record(self, source: EndSource, end: JobEnd) -> None:
        if end.successor:
            for waiter in self._awaited.waiters_of(end.sequence):
                if end.event_sequence >= self._start_of(waiter, source):
                    self._follow(waiter, end, end.successor)
        elif not end.is_alive and end.note != REPORTED and end.sequence in self._awaited:
            # Something else may be recorded of the job behind it.
            self._unconfirmed.put_nowait((source, end))

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
                log.warning("Reading %s failed, trying again: %s", stream, error)
                await asyncio.sleep(_RETRY_PAUSE)
            except JetStreamProviderError as error:
                note = f"{end.note}, whose end can't be known: {error}"
                log.warning("Job %d of %s: %s", end.sequence, self._cursor.queue, note)
                waiter.record_end(end._replace(note=note, successor=None))
                return
        job.cursor = cursor
        async with shared_dispatcher(self._connection, cursor) as dispatcher:
            dispatcher.add(job)
            try:
                await asyncio.wait([job.finished])
            finally:
                dispatcher.remove(job)

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
        await self._claims.settled()

    def _dispatch_advised(self, end: JobEnd) -> None:
        self._dispatch(end, self._events)

    def _dispatch_reconciled(self, end: JobEnd) -> None:
        latest = self._audit.latest(end.sequence) if self._audit and end.kind is EndKind.VANISHED else None
        self._dispatch(latest if latest and not latest.is_alive else end, None)

    def _dispatch(self, end: JobEnd, source: EndSource | None) -> None:
        for waiter in self._awaited.waiters_of(end.sequence):
            if source and end.event_sequence < self._start_of(waiter, source):
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

    def _dispatch_stalls(self) -> None:
        if absence := self._stalls.absence:
            for waiter in self._awaited.waiters():
                waiter.record_stalls([(None, absence)])
            return
        stalls: dict[int, tuple[Waiter, list[tuple[int | None, Stall]]]] = {}
        for sequence, stall in self._stalls:
            for waiter in self._awaited.waiters_of(sequence):
                stalls.setdefault(id(waiter), (waiter, []))[1].append((sequence, stall))
        for waiter, of_waiter in stalls.values():
            waiter.record_stalls(of_waiter)

    async def _confirm_deaths(self) -> None:
        while True:
            ends = [await self._unconfirmed.get()]
            await self._events.wait_until_read()
            await self._claims.settled()
            if self._audit:
                await self._audit.wait_until_read()
            while len(ends) < MAX_CONCURRENT and not self._unconfirmed.empty():
                ends.append(self._unconfirmed.get_nowait())
            try:
                completed = await map_concurrently(self._is_completed, [end for _, end in ends])
            except TransientError as error:
                if self._connection.is_closed:
                    raise
                log.warning("Reading %s failed, trying again: %s", self._cursor.events, error)
                for unconfirmed in ends:
                    self._unconfirmed.put_nowait(unconfirmed)
                    self._unconfirmed.task_done()
                await asyncio.sleep(_RETRY_PAUSE)
                continue
            for (source, end), is_completed in zip(ends, completed, strict=True):
                if not is_completed and not self._is_superseded(source, end):
                    self._dispatch(end, source)
                self._unconfirmed.task_done()

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


_dispatchers: WeakKeyDictionary[Connection, dict[tuple[str | None, ...], EndDispatcher]] = WeakKeyDictionary()


class SharedDispatcher:
    """Uses a dispatcher while the block runs; see :func:`shared_dispatcher`."""

    # Not a generator: there is one for each wait.
    __slots__ = ("_connection", "_cursor", "_dispatcher")

    def __init__(self, connection: Connection, cursor: Cursor) -> None:
        self._connection = connection
        self._cursor = cursor
        self._dispatcher: EndDispatcher | None = None

    async def __aenter__(self) -> EndDispatcher:
        connection, cursor = self._connection, self._cursor
        dispatchers = _dispatchers.setdefault(connection, {})
        dispatcher = dispatchers.get(key := _key(cursor))
        if dispatcher is None or dispatcher.has_failed:
            dispatcher = dispatchers[key] = EndDispatcher(connection, cursor)
            dispatcher.start()
        dispatcher.waiter_count += 1
        self._dispatcher = dispatcher
        return dispatcher

    async def __aexit__(self, *_: object) -> None:
        dispatcher, self._dispatcher = self._dispatcher, None
        if dispatcher is None:
            return
        dispatcher.waiter_count -= 1
        if not dispatcher.waiter_count:
            dispatchers, key = _dispatchers.get(self._connection, {}), _key(self._cursor)
            if dispatchers.get(key) is dispatcher:
                del dispatchers[key]
            await dispatcher.stop()


def shared_dispatcher(connection: Connection, cursor: Cursor) -> SharedDispatcher:
    """Use a connection's one dispatcher of a queue, in an ``async with``; it stops with its last waiter."""
    return SharedDispatcher(connection, cursor)


def _key(cursor: Cursor) -> tuple[str | None, ...]:
    return (cursor.queue, cursor.created, cursor.events, cursor.dead_letters, cursor.audit, *cursor.advisory_subjects)
