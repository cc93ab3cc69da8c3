"""How a run ends: its completion is stored, then its delivery acknowledged, both confirmed, and its outcome logged.

Both requests are written with all else of the loop's turn and confirmed in the background, without a task or a timer.
Where a confirmation doesn't come, or isn't one, a task of the run's own repeats what isn't confirmed.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.wire_text import encode_text
from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError, UnreachableError
from airflow_provider_jetstream.worker.acknowledgement import ANSWER_TIMEOUT, send_until_confirmed
from airflow_provider_jetstream.worker.delivery_outcome import DeliveryOutcome, log_outcome

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import TypeAlias

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.worker.completion import CompletionWriter
    from airflow_provider_jetstream.worker.confirmations import Confirmations, OnAnswer
    from airflow_provider_jetstream.worker.in_flight import InFlightJobs
    from airflow_provider_jetstream.worker.job_run import JobRun
    from airflow_provider_jetstream.worker.metrics import ConsumerMetrics

    Ended: TypeAlias = tuple[DeliveryOutcome, Exception | None]

log = logging.getLogger("jetstream.worker")


@dataclass(frozen=True, slots=True)
class JobSettlement:
    """Ends the runs of one consumer's jobs."""

    connection: Connection
    worker: str
    completions: CompletionWriter
    confirmations: Confirmations
    jobs: InFlightJobs
    metrics: ConsumerMetrics

    def repeat(self, run: JobRun) -> None:
        """Send the request of a run again that isn't confirmed in time."""
        run.answer_at = inf
        self.confirmations.forget(run.request)
        log.warning("the end of job %s isn't confirmed yet, sending it again", run.job.shown_id)
        self.do(run, self._settle_again(run, drop_unsent=True))

    def do(self, run: JobRun, steps: Coroutine[Any, Any, Ended]) -> None:
        """Let a task do the rest of a run."""
        run.task = asyncio.create_task(self._finish(run, steps))

    async def _finish(self, run: JobRun, steps: Coroutine[Any, Any, Ended]) -> None:
        outcome: DeliveryOutcome = DeliveryOutcome.UNSETTLED
        error: Exception | None = None
        try:
            outcome, error = await steps
        except Exception as unsettled:  # noqa: BLE001 - it is logged, and the job comes back after its ack wait
            error = unsettled
            if isinstance(unsettled, PermissionDeniedError):
                self.jobs.denial = unsettled
        finally:
            self._end(run, outcome, error)

    def _end(self, run: JobRun, outcome: DeliveryOutcome, error: Exception | None = None) -> None:
        self.jobs.end(run, outcome)
        seconds = asyncio.get_running_loop().time() - run.began
        self.metrics.record_delivery(outcome, seconds)
        log_outcome(self.worker, run.message, run.job, outcome, error, seconds)

    def store(self, run: JobRun) -> None:
        """Store the completion, and free the job's slot."""
        self.jobs.release(run)
        if not self.completions.has_events:
            self._on_stored(run, None, b"")
            return
        subject, headers = self.completions.address(run.message, run.job)
        self._request(run, subject, run.payload, partial(self._on_stored, run), headers)

    def _on_stored(self, run: JobRun, headers: bytes | None, answer: bytes | None) -> None:
        if self.completions.has_events and (headers or answer is None or not self.completions.is_stored(answer)):
            self.do(run, self._settle_again(run))
            return
        run.is_stored = True
        try:
            if report := self.completions.report(run.job, run.payload):
                self.connection.write(report)
        except UnreachableError:
            run.is_stored = False
            self.do(run, self._settle_again(run))
            return
        self._request(run, encode_text(run.message.reply), b"+ACK", partial(self._on_acknowledged, run))

    def _on_acknowledged(self, run: JobRun, headers: bytes | None, answer: bytes | None) -> None:
        if headers or answer is None:
            self.do(run, self._settle_again(run))
        else:
            self._end(run, DeliveryOutcome.COMPLETED)

    def _request(self, run: JobRun, subject: bytes, payload: bytes, on_answer: OnAnswer, headers: bytes = b"") -> None:
        try:
            run.request = self.confirmations.request(subject, payload, on_answer, headers)
        except UnreachableError:
            self.do(run, self._settle_again(run))
            return
        run.answer_at = asyncio.get_running_loop().time() + ANSWER_TIMEOUT
        run.due = min(run.signal_at, run.answer_at)
        self.jobs.sweep.expect(run.due)

    async def _settle_again(self, run: JobRun, *, drop_unsent: bool = False) -> Ended:
        """Repeat what isn't confirmed until it is; both requests may arrive twice."""
        run.answer_at = inf
        if drop_unsent:
            await self.connection.drop_unsent()
        if not run.is_stored:
            await self.completions.store(run.message, run.job, run.payload)
        await self.acknowledge(run)
        return DeliveryOutcome.COMPLETED, None

    async def acknowledge(self, run: JobRun) -> None:
        """Acknowledge a job, until that is confirmed."""
        acknowledge = partial(self.connection.request, run.message.reply, b"+ACK", time_limit=ANSWER_TIMEOUT)
        await send_until_confirmed(acknowledge, f"the acknowledgement of job {run.job.shown_id}")
