"""One reader of the ends of a queue's jobs, shared by all waiters of a connection."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from contextvars import copy_context
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
from airflow_provider_jetstream.jetstream.waiting.end_evidence_check import EndEvidenceCheck
from airflow_provider_jetstream.jetstream.waiting.event_source import EndSource
from airflow_provider_jetstream.jetstream.waiting.job_end import EndKind
from airflow_provider_jetstream.jetstream.waiting.queue_identity import QueueIdentity
from airflow_provider_jetstream.jetstream.waiting.reconciler import Reconciler
from airflow_provider_jetstream.jetstream.waiting.stalls import Stalls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator, Mapping
    from typing import Any

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
    from airflow_provider_jetstream.jetstream.waiting.job_end import JobEnd
    from airflow_provider_jetstream.jetstream.waiting.policy import WaitPolicy
    from airflow_provider_jetstream.jetstream.waiting.report import WaitReport
    from airflow_provider_jetstream.jetstream.waiting.stalls import Stall, StallPolicy

log = logging.getLogger(__name__)

_RETRY_PAUSE = 1.0


class Waiter:
    """One wait for jobs.

    :param cursor: taken before the jobs were published
    :param report: the state of the jobs
    :param policy: when waiting is over before every job has ended
    :param progress: called after each end
    :param advised: the jobs that workers of any make report on advisory subjects: stream sequences by digests
    :param stall_policy: what to do about jobs that no consumer delivers; where absent, nothing
    """

    __slots__ = (
        *("_context", "_known_stall", "_policy", "_progress", "_stall_policy", "advised", "cursor", "finished"),
        "report",
    )

    def __init__(
        self,
        cursor: Cursor,
        report: WaitReport,
        policy: WaitPolicy,
        progress: Callable[[WaitReport], None],
        advised: Mapping[str, int],
        stall_policy: StallPolicy | None = None,
    ) -> None:
        self.cursor = cursor
        self.report = report
        unsettled = set(report.unsettled())
        self.advised = {digest: sequence for digest, sequence in advised.items() if sequence in unsettled}
        self._policy = policy
        self._progress = progress
        self._stall_policy = stall_policy
        self._known_stall = ""
        # The dispatcher's tasks run in the context of its first waiter, and Airflow finds a task's log by the context.
        self._context = copy_context()
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._check()

    def record_end(self, end: JobEnd) -> None:
        """Record an end; ends of other jobs change nothing."""
        if self.finished.done() or not self.report.record(end):
            return
        self._context.run(self._progress, self.report)
        self._check()

    def record_stalls(self, stalls: Iterable[tuple[int | None, Stall]]) -> None:
        """Record jobs that aren't delivered, or with ``None`` that none is; jobs of other waiters change nothing."""
        policy, awaited = self._stall_policy, self.report.awaited
        if self.finished.done() or not policy:
            return
        due = [(job, stall) for job, stall in stalls if (job is None or job in awaited) and policy.is_due(stall)]
        if not due or self._policy.is_attainable_without(self.report, len(due)):
            return
        job, stall = due[0]
        if error := policy.failure(self.cursor.queue, job, stall):
            self.finished.set_exception(error)
        elif stall.reason != self._known_stall:
            self._known_stall = stall.reason
            self._context.run(log.warning, "%s", policy.warning(self.cursor.queue, job, stall))

    def _check(self) -> None:
        if self._policy.is_finished(self.report):
            self.finished.set_result(None)


class EndDispatcher:
    """Reads the ends of a queue's jobs and dispatches each to the waiters of its job.

    :param cursor: the first waiter's
    """

    def __init__(self, connection: Connection, cursor: Cursor) -> None:
        self._connection = connection
        self._cursor = cursor
        self._waiters: dict[int, list[Waiter]] = {}
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
            self._waiters.keys(),
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
        sequences = waiter.report.unsettled()
        for sequence in sequences:
            self._waiters.setdefault(sequence, []).append(waiter)
        self._advisory_ends.add(waiter.advised)
        if not set(waiter.advised.values()).issuperset(sequences):
            self._evidence.request()
        for source in self._sources():
            start = self._start_of(waiter, source)
            for end in source.recent_ends(sequences, start):
                self._on_end(source, end)
            for report in source.recent_reports(waiter.advised, start):
                self._advisory_ends.take(report)
            source.request_backlog(start)

    def remove(self, waiter: Waiter) -> None:
        """Dispatch no more ends to a waiter."""
        for sequence in waiter.report.unsettled():
            self._drop(sequence, waiter)
        self._advisory_ends.remove(waiter.advised)

    def unsampled_since(self, moment: float) -> dict[str, str]:
        """By consumer, why the server didn't report each of its acknowledgements at any time since a moment."""
        return self._evidence.unsampled_since(moment)

    async def confirm(self, waiter: Waiter) -> None:
        """Return if the ends that a waiter has are those of its jobs; see :meth:`QueueIdentity.confirm`."""
        await self._identity.confirm(waiter.report.last_end_at)

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
        waiters = self._waiters.get(sequence, ())
        return any(self._start_of(waiter, self._events) <= event_sequence for waiter in waiters)

    def _on_end(self, source: EndSource, end: JobEnd) -> None:
        if end.sequence not in self._waiters:
            return
        if end.kind is EndKind.DEAD:
            # A completion of the job may be stored too, and a waiter that starts late must not report it dead.
            self._unconfirmed.put_nowait(end)
        else:
            self._dispatch(end, source)

    async def _wait_until_read(self) -> None:
        for source in self._sources():
            await source.wait_until_read()

    def _dispatch_advised(self, end: JobEnd) -> None:
        self._dispatch(end, self._events)

    def _dispatch_reconciled(self, end: JobEnd) -> None:
        self._dispatch(end, None)

    def _dispatch(self, end: JobEnd, source: EndSource | None) -> None:
        for waiter in tuple(self._waiters.get(end.sequence, ())):
            if source and end.event_sequence < self._start_of(waiter, source):
                continue
            waiter.record_end(end)
            if end.kind in (EndKind.COMPLETED, EndKind.CANCELLED):
                self._drop(end.sequence, waiter)

    def _dispatch_stalls(self) -> None:
        if absence := self._stalls.absence:
            for waiter in self._all_waiters():
                waiter.record_stalls([(None, absence)])
            return
        stalls: dict[int, tuple[Waiter, list[tuple[int | None, Stall]]]] = {}
        for sequence, stall in self._stalls:
            for waiter in self._waiters.get(sequence, ()):
                stalls.setdefault(id(waiter), (waiter, []))[1].append((sequence, stall))
        for waiter, of_waiter in stalls.values():
            waiter.record_stalls(of_waiter)

    def _all_waiters(self) -> Collection[Waiter]:
        return {id(waiter): waiter for waiters in self._waiters.values() for waiter in waiters}.values()

    def _drop(self, sequence: int, waiter: Waiter) -> None:
        waiters = self._waiters.get(sequence, [])
        if waiter in waiters:
            waiters.remove(waiter)
        if not waiters:
            self._waiters.pop(sequence, None)

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
                await asyncio.sleep(_RETRY_PAUSE)
                continue
            for end, is_completed in zip(ends, completed, strict=True):
                if not is_completed:
                    self._dispatch(end, self._deaths)

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
        for waiter in self._all_waiters():
            if not waiter.finished.done():
                waiter.finished.set_exception(error)


_dispatchers: WeakKeyDictionary[Connection, dict[tuple[str | None, ...], EndDispatcher]] = WeakKeyDictionary()


@asynccontextmanager
async def shared_dispatcher(connection: Connection, cursor: Cursor) -> AsyncIterator[EndDispatcher]:
    """Use a connection's one dispatcher of a queue; it stops with its last waiter."""
    dispatchers = _dispatchers.setdefault(connection, {})
    key = (cursor.queue, cursor.created, cursor.events, cursor.dead_letters, *cursor.advisory_subjects)
    dispatcher = dispatchers.get(key)
    if dispatcher is None or dispatcher.has_failed:
        dispatcher = dispatchers[key] = EndDispatcher(connection, cursor)
        dispatcher.start()
    dispatcher.waiter_count += 1
    try:
        yield dispatcher
    finally:
        dispatcher.waiter_count -= 1
        if not dispatcher.waiter_count:
            if dispatchers.get(key) is dispatcher:
                del dispatchers[key]
            await dispatcher.stop()
