"""One reader of the ends of a queue's jobs, shared by all waiters of a connection."""

from __future__ import annotations

import asyncio
import logging
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
from airflow_provider_jetstream.jetstream.waiting.advisory_ends import AdvisoryEnds
from airflow_provider_jetstream.jetstream.waiting.awaited_jobs import AwaitedJobs
from airflow_provider_jetstream.jetstream.waiting.end_evidence_check import EndEvidenceCheck
from airflow_provider_jetstream.jetstream.waiting.event_source import EndSource
from airflow_provider_jetstream.jetstream.waiting.job_end import EndKind
from airflow_provider_jetstream.jetstream.waiting.queue_identity import QueueIdentity
from airflow_provider_jetstream.jetstream.waiting.reconciler import Reconciler
from airflow_provider_jetstream.jetstream.waiting.stalls import Stalls

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from typing import Any

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
    from airflow_provider_jetstream.jetstream.waiting.job_end import JobEnd
    from airflow_provider_jetstream.jetstream.waiting.stalls import Stall
    from airflow_provider_jetstream.jetstream.waiting.waiter import Waiter

log = logging.getLogger(__name__)

_RETRY_PAUSE = 1.0


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
        self._unconfirmed: asyncio.Queue[JobEnd] = asyncio.Queue()
        self._evidence = EndEvidenceCheck(connection, cursor)
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
        ]
        for source in self._sources():
            coroutines += [source.follow(), source.read_backlog()]
        for coroutine in coroutines:
            task = asyncio.create_task(coroutine)
            task.add_done_callback(self._on_task_end)
            self._tasks.append(task)

    async def stop(self) -> None:
        """Cancel the tasks that read."""
        for task in self._tasks:
            task.remove_done_callback(self._on_task_end)
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

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
                self._on_end(source, end)
            for message in source.recent_reports(waiter.advised, start):
                self._advisory_ends.take(message)
            source.request_backlog(start)

    def remove(self, waiter: Waiter) -> None:
        """Dispatch no more ends to a waiter."""
        self._awaited.remove(waiter)
        self._advisory_ends.remove(waiter.advised)

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

    def _start_of(self, waiter: Waiter, source: EndSource) -> int:
        cursor = waiter.cursor
        if source is self._events:
            return source.start_of(cursor.events_from, cursor.events_created)
        return source.start_of(cursor.dead_letters_from, cursor.dead_letters_created)

    def _is_awaited(self, sequence: int, event_sequence: int = 2**64) -> bool:
        waiters = self._awaited.waiters_of(sequence)
        return any(self._start_of(waiter, self._events) <= event_sequence for waiter in waiters)

    def _on_end(self, source: EndSource, end: JobEnd) -> None:
        if end.kind is EndKind.DEAD and end.sequence in self._awaited:
            # A completion of the job may be stored too, and a waiter that starts late must not report it dead.
            self._unconfirmed.put_nowait(end)
        elif end.kind is not EndKind.DEAD:
            self._dispatch(end, source)

    async def _wait_until_read(self) -> None:
        for source in self._sources():
            await source.wait_until_read()

    def _dispatch_advised(self, end: JobEnd) -> None:
        self._dispatch(end, self._events)

    def _dispatch_reconciled(self, end: JobEnd) -> None:
        self._dispatch(end, None)

    def _dispatch(self, end: JobEnd, source: EndSource | None) -> None:
        for waiter in self._awaited.waiters_of(end.sequence):
            if source and end.event_sequence < self._start_of(waiter, source):
                continue
            waiter.record_end(end)
            if end.kind in (EndKind.COMPLETED, EndKind.CANCELLED):
                self._awaited.drop(end.sequence, waiter)

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
            while len(ends) < MAX_CONCURRENT and not self._unconfirmed.empty():
                ends.append(self._unconfirmed.get_nowait())
            try:
                completed = await map_concurrently(self._is_completed, ends)
            except TransientError as error:
                if self._connection.is_closed:
                    raise
                log.warning("Reading %s failed, trying again: %s", self._cursor.events, error)
                for end in ends:
                    self._unconfirmed.put_nowait(end)
                    self._unconfirmed.task_done()
                await asyncio.sleep(_RETRY_PAUSE)
                continue
            for end, is_completed in zip(ends, completed, strict=True):
                if not is_completed:
                    self._dispatch(end, self._deaths)
                self._unconfirmed.task_done()

    async def _is_completed(self, end: JobEnd) -> bool:
        subject = completion_subject(self._cursor.queue, end.consumer, end.sequence)
        last = await last_message(self._connection, self._cursor.events, subject)
        # Then the reader of the events stream dispatches the completion.
        return last is not None and last.stored_at >= datetime.fromisoformat(self._cursor.created)

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
    return (cursor.queue, cursor.created, cursor.events, cursor.dead_letters, *cursor.advisory_subjects)
