"""One wait for jobs: it records their ends, and is finished when its policy says so."""

from __future__ import annotations

import asyncio
import logging
from contextvars import copy_context
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.waiting.report import WaitReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
    from airflow_provider_jetstream.jetstream.waiting.job_end import JobEnd, Successor
    from airflow_provider_jetstream.jetstream.waiting.policy import WaitPolicy
    from airflow_provider_jetstream.jetstream.waiting.stalls import Stall, StallPolicy

log = logging.getLogger(__name__)

_NO_JOBS: Final[Mapping[str, int]] = MappingProxyType({})
_NONE_REDRIVEN: Final[Mapping[int, Any]] = MappingProxyType({})


class Waiter:
    """One wait for jobs.

    :param cursor: taken before the jobs were published
    :param report: the state of the jobs
    :param policy: when waiting is over before every job has ended
    :param progress: called after each end
    :param advised: the jobs that workers of any make report on advisory subjects: stream sequences by digests
    :param stall_policy: what to do about jobs that no consumer delivers; where absent, nothing
    :ivar redriven: by stream sequence the jobs that were redriven, with the waits for their new jobs
    """

    __slots__ = (
        *("_context", "_known_stall", "_policy", "_progress", "_stall_policy", "advised", "cursor", "finished"),
        *("redriven", "report"),
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
        self.redriven: Mapping[int, SuccessorWaiter] = _NONE_REDRIVEN
        self.advised = (
            {digest: job for digest, job in advised.items() if report.is_unsettled(job)} if advised else _NO_JOBS
        )
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

    def note_redriven(self, job: SuccessorWaiter) -> None:
        """Note the wait for the new job of a redriven one."""
        redriven = self.redriven if isinstance(self.redriven, dict) else {}
        redriven[job.sequence] = job
        self.redriven = redriven

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


class SuccessorWaiter(Waiter):
    """Awaits the new job of a redriven one, and records its end as that of the job that the wait is for.

    :param origin: the wait for the redriven job
    :param sequence: the stream sequence of that job
    :param cursor: of the queue that has the new job
    :param successor: the new job
    :param record: the sequence in the audit of the record that says so
    :ivar depth: how many times the job has been redriven by then
    """

    __slots__ = ("depth", "origin", "record", "sequence", "successor")

    def __init__(self, origin: Waiter, sequence: int, cursor: Cursor, successor: Successor, record: int) -> None:
        # Not as a wait of its own: it has no policy, and is over with the other one.
        self.cursor = cursor
        self.report = WaitReport({successor.sequence})
        self.advised = {}
        self.finished = origin.finished
        self.redriven = _NONE_REDRIVEN
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
            copy = self.report.copies.get(end.sequence, end.sequence)
            self.origin.report.note_copy(self.sequence, copy)
        self.origin.record_end(end._replace(sequence=self.sequence, note=note, has_result=has_result))

    def record_stalls(self, stalls: Iterable[tuple[int | None, Stall]]) -> None:
        """Record stalls of the new job for the redriven one."""
        own = [(None if job is None else self.sequence, stall) for job, stall in stalls]
        self.origin.record_stalls(own)
