"""The waits of a queue: each records the ends of its jobs, and is finished when its policy says so.

They are found by job where a wait has few, and asked where it has many.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from bisect import bisect_right
from contextvars import copy_context
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.waiting.report import MANY, ManySequences, WaitReport

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping

    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
    from airflow_provider_jetstream.jetstream.waiting.ends import JobEnd, Successor
    from airflow_provider_jetstream.jetstream.waiting.policy import Stall, StallPolicy, WaitPolicy

log = logging.getLogger(__name__)

# How many jobs are looked at without letting others use the event loop.
_SLICE: Final = 5_000
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
        now = time.monotonic()
        due = [(job, stall) for job, stall in stalls if (job is None or job in awaited) and policy.is_due(stall, now)]
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


class AwaitedJobs:
    """The waiters of a queue by the stream sequences of their jobs."""

    def __init__(self) -> None:
        self._by_job: dict[int, list[Waiter]] = {}
        self._with_many: dict[int, Waiter] = {}
        # What they awaited at first, in order.
        self._ordered: dict[int, array[int]] = {}

    def __contains__(self, sequence: object) -> bool:
        if sequence in self._by_job:
            return True
        return any(waiter.report.is_unsettled(sequence) for waiter in self._with_many.values())

    def add(self, waiter: Waiter) -> None:
        """Add a waiter to those of its jobs whose state may change."""
        if waiter.report.unsettled_count >= MANY:
            self._with_many[id(waiter)] = waiter
            return
        for sequence in waiter.report.unsettled():
            self._by_job.setdefault(sequence, []).append(waiter)

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter from all its jobs."""
        self._ordered.pop(id(waiter), None)
        if self._with_many.pop(id(waiter), None) is None:
            for sequence in waiter.report.unsettled():
                self.drop(sequence, waiter)

    def drop(self, sequence: int, waiter: Waiter) -> None:
        """Remove a waiter from a job that has ended for good."""
        if (waiters := self._by_job.get(sequence)) is None:
            return
        if waiter in waiters:
            waiters.remove(waiter)
        if not waiters:
            del self._by_job[sequence]

    def waiters_of(self, sequence: int) -> list[Waiter]:
        """Return the waiters that await a job."""
        waiters = list(self._by_job.get(sequence, ()))
        if self._with_many:
            waiters += [waiter for waiter in self._with_many.values() if waiter.report.is_unsettled(sequence)]
        return waiters

    def waiters(self) -> list[Waiter]:
        """Return all waiters."""
        few = {id(waiter): waiter for waiters in self._by_job.values() for waiter in waiters}
        return [*few.values(), *self._with_many.values()]

    def record_stalls(self, stalls: Mapping[int | None, Stall]) -> None:
        """Let the waiters know which jobs aren't delivered, or with ``None`` that none is."""
        of_waiters: dict[Waiter, list[tuple[int | None, Stall]]] = {}
        for sequence, stall in stalls.items():
            for waiter in self.waiters() if sequence is None else self.waiters_of(sequence):
                of_waiters.setdefault(waiter, []).append((sequence, stall))
        for waiter, of_waiter in of_waiters.items():
            waiter.record_stalls(of_waiter)

    async def some(self, above: int, upto: int, after: int, most: int, *, besides: Container[int] = ()) -> list[int]:
        """Return some awaited sequences above one and up to another, in order: those after a third, else the first.

        :param most: how many at most
        :param besides: none of these
        """
        found = await self._between(max(above, after), upto, most, besides)
        return found or await self._between(above, upto, most, besides)

    async def _between(self, above: int, upto: int, most: int, besides: Container[int]) -> list[int]:
        few = sorted(job for job in self._by_job if above < job <= upto and job not in besides)
        found = set(few[:most])
        for waiter in tuple(self._with_many.values()):
            sequences, chosen = await self._ordered_jobs(waiter), 0
            for position in range(bisect_right(sequences, above), bisect_right(sequences, upto)):
                if not position % _SLICE:
                    await asyncio.sleep(0)
                if waiter.report.is_unsettled(sequence := sequences[position]) and sequence not in besides:
                    found.add(sequence)
                    chosen += 1
                    if chosen == most:
                        break
        return sorted(found)[:most]

    async def _ordered_jobs(self, waiter: Waiter) -> array[int]:
        if (ordered := self._ordered.get(id(waiter))) is not None:
            return ordered
        report, ordered = waiter.report, array("Q")
        if isinstance(report.awaited, ManySequences) and not (report.dead or report.unaccounted):
            for part in report.awaited.ordered_parts():
                ordered.extend(part)
                await asyncio.sleep(0)
        else:
            ordered.extend(sorted(report.unsettled()))
        if id(waiter) in self._with_many:
            self._ordered[id(waiter)] = ordered
        return ordered
