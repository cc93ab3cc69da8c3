"""The waits of a queue: each records the ends of its jobs, and is finished when its policy says so.

They are found by job where a wait has few, and asked where it has many.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextvars import copy_context
from itertools import islice, takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.waiting.report import MANY, ManySequences, WaitReport

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
    from airflow_provider_jetstream.jetstream.waiting.ends import JobEnd, Statement, Successor
    from airflow_provider_jetstream.jetstream.waiting.policy import Stall, StallPolicy, WaitPolicy

log = logging.getLogger(__name__)

# What most waits have none of: ten thousand of them share it, and nobody changes it.
_NOTHING: Final[Any] = MappingProxyType({})


class Waiter:
    """One wait for jobs.

    :param cursor: taken before the jobs were published
    :param report: the state of the jobs
    :param policy: when waiting is over before every job has ended
    :param progress: called after each end
    :param advised: the jobs that workers of any make report on advisory subjects: stream sequences by digests
    :param stall_policy: what to do about jobs that no consumer delivers; where absent, nothing
    :ivar finished: done when the policy says so, or the ends can't be read any more
    :ivar confirmed: done when the ends are known to belong to the cursor's stream
    :ivar redriven: by stream sequence the jobs that were redriven, with the waits for their new jobs
    """

    __slots__ = (
        *("_context", "_known_stall", "_policy", "_progress", "_stall_policy", "advised", "confirmed", "cursor"),
        *("finished", "redriven", "report"),
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
        self.redriven: dict[int, SuccessorWaiter] = _NOTHING
        self.advised = {digest: job for digest, job in advised.items() if report.is_unsettled(job)} or _NOTHING
        self._policy = policy
        self._progress = progress
        self._stall_policy = stall_policy
        self._known_stall = ""
        # The follower's tasks run in the context of its first waiter, and Airflow finds a task's log by the context.
        self._context = copy_context()
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.confirmed: asyncio.Future[None] | None = None
        self._check()

    def record_end(self, end: JobEnd) -> None:
        """Record an end; ends of other jobs change nothing."""
        if not self.finished.done() and self.report.record(end):
            self._context.run(self._progress, self.report)
            self._check()

    def fail(self, error: BaseException) -> None:
        """End the wait with an error, where it isn't over."""
        for future in (self.finished, self.confirmed):
            if future and not future.done():
                future.set_exception(error)

    def record_stalls(self, stalls: Iterable[tuple[int | None, Stall]]) -> None:
        """Record jobs that aren't delivered, or with ``None`` that none is; jobs of other waiters change nothing."""
        policy, awaited, now = self._stall_policy, self.report.awaited, time.monotonic()
        if self.finished.done() or not policy:
            return
        due = [(job, stall) for job, stall in stalls if (job is None or job in awaited) and policy.is_due(stall, now)]
        if not due or self._policy.is_attainable_without(self.report, len(due)):
            return
        job, stall = due[0]
        if error := policy.failure(self.cursor.queue, job, stall):
            self.finished.set_exception(error)
        elif stall.reason != self._known_stall:
            self._known_stall = stall.reason
            self._context.run(log.warning, "%s", policy.warning(self.cursor.queue, job, stall))

    def is_about(self, statement: Statement) -> bool:
        """Return whether a statement is about a job whose state may still change."""
        key = statement.key
        return key in self.advised if isinstance(key, str) else self.report.is_unsettled(key)

    def _check(self) -> None:
        if self._policy.is_finished(self.report):
            self.finished.set_result(None)


class SuccessorWaiter(Waiter):
    """Awaits the new job of a redriven one, and records its end as that of the job that the wait is for.

    :param origin: the wait for the redriven job
    :param sequence: the stream sequence of that job
    :param cursor: of the queue that has the new job
    :param record: the sequence in the audit of the record that says so
    """

    __slots__ = ("depth", "origin", "record", "sequence", "successor")

    def __init__(self, origin: Waiter, sequence: int, cursor: Cursor, successor: Successor, record: int) -> None:
        # Not as a wait of its own: it has no policy, and is over with the other one.
        self.cursor = cursor
        self.report = WaitReport({successor.sequence})
        self.advised = _NOTHING
        self.finished, self.confirmed = origin.finished, None
        self.redriven = _NOTHING
        self.origin = origin
        self.sequence = sequence
        self.successor = successor
        self.record = record
        self.depth: int = origin.depth + 1 if isinstance(origin, SuccessorWaiter) else 1

    def record_end(self, end: JobEnd) -> None:
        """Record an end of the new job for the redriven one."""
        if end.sequence != self.successor.sequence or not self.report.record(end):
            return
        note = f"{self.successor.describe()}: {end.note}" if end.note else ""
        # A completion in another events stream isn't among those from which the wait reads results.
        has_result = end.has_result and self.cursor.events == self.origin.cursor.events
        if self.cursor.queue == self.origin.cursor.queue:
            self.origin.report.note_copy(self.sequence, self.report.copies.get(end.sequence, end.sequence))
        self.origin.record_end(end._replace(sequence=self.sequence, note=note, has_result=has_result))

    def record_stalls(self, stalls: Iterable[tuple[int | None, Stall]]) -> None:
        """Record stalls of the new job for the redriven one."""
        self.origin.record_stalls((None if job is None else self.sequence, stall) for job, stall in stalls)


class AwaitedJobs:
    """The waiters of a queue by the stream sequences of their jobs."""

    def __init__(self) -> None:
        self._by_job: dict[int, tuple[Waiter, ...]] = {}
        self._with_many: set[Waiter] = set()

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._by_job or any(waiter.report.is_unsettled(sequence) for waiter in self._with_many)

    def add(self, waiter: Waiter) -> None:
        """Register a waiter for its jobs whose state may change."""
        if waiter.report.unsettled_count >= MANY:
            self._with_many.add(waiter)
            return
        for sequence in waiter.report.unsettled():
            self._by_job[sequence] = (*self._by_job.get(sequence, ()), waiter)

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter from all its jobs."""
        if waiter in self._with_many:
            self._with_many.remove(waiter)
            return
        for sequence in waiter.report.unsettled():
            self.drop(sequence, waiter)

    def drop(self, sequence: int, waiter: Waiter) -> None:
        """Remove a waiter from a job that has ended for good."""
        if left := tuple(other for other in self._by_job.get(sequence, ()) if other is not waiter):
            self._by_job[sequence] = left
        else:
            self._by_job.pop(sequence, None)

    def waiters_of(self, sequence: int) -> tuple[Waiter, ...]:
        """Return the waiters that await a job."""
        waiters = self._by_job.get(sequence, ())
        if self._with_many:
            waiters += tuple(waiter for waiter in self._with_many if waiter.report.is_unsettled(sequence))
        return waiters

    def waiters(self) -> set[Waiter]:
        """Return all waiters of jobs whose state may change."""
        return self._with_many.union(*self._by_job.values())

    def record_stalls(self, stalls: Mapping[int | None, Stall]) -> None:
        """Let the waiters know which jobs aren't delivered, or with ``None`` that none is."""
        of_waiters: dict[Waiter, list[tuple[int | None, Stall]]] = {}
        for sequence, stall in stalls.items():
            for waiter in self.waiters() if sequence is None else self.waiters_of(sequence):
                of_waiters.setdefault(waiter, []).append((sequence, stall))
        for waiter, of_waiter in of_waiters.items():
            waiter.record_stalls(of_waiter)

    def some(self, above: int, upto: int, most: int, besides: Collection[int] = ()) -> list[int]:
        """Return the first jobs that haven't ended, above one sequence and up to another, in order; none besides."""
        found = {
            job
            for job, waiters in self._by_job.items()
            if above < job <= upto and any(job in waiter.report.awaited for waiter in waiters)
        }
        for waiter in self._with_many:
            awaited = waiter.report.awaited
            if isinstance(awaited, ManySequences):
                later: Iterable[int] = awaited.from_(above + 1)
            else:
                later = sorted(job for job in awaited if job > above)
            found.update(takewhile(upto.__ge__, islice(later, most + len(besides))))
        return sorted(found.difference(besides))[:most]
