"""One wait for jobs: it records their ends, and is finished when its policy says so."""

from __future__ import annotations

import asyncio
import logging
from contextvars import copy_context
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
    from airflow_provider_jetstream.jetstream.waiting.job_end import JobEnd
    from airflow_provider_jetstream.jetstream.waiting.policy import WaitPolicy
    from airflow_provider_jetstream.jetstream.waiting.report import WaitReport
    from airflow_provider_jetstream.jetstream.waiting.stalls import Stall, StallPolicy

log = logging.getLogger(__name__)

_NO_JOBS: Final[Mapping[str, int]] = MappingProxyType({})


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
