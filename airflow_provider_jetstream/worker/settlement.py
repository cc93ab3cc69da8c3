"""How a run ends: its completion is stored, then its delivery acknowledged, both confirmed, and its outcome logged.

Both requests are written together with those of the other jobs that are done in the same turn of the event loop, and
confirmed in the background, without a task or a timer. Where a confirmation doesn't come, or isn't one, a task of the
run's own repeats what isn't confirmed.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from math import inf
from typing import TYPE_CHECKING, Any, Self

from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError, UnreachableError
from airflow_provider_jetstream.worker.acknowledgement import ANSWER_TIMEOUT, end_delivery
from airflow_provider_jetstream.worker.confirmations import Confirmations
from airflow_provider_jetstream.worker.delivery_outcome import DeliveryOutcome, is_outcome_logged, log_outcome

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from typing import TypeAlias

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.worker.completion import CompletionWriter
    from airflow_provider_jetstream.worker.in_flight import InFlightJobs
    from airflow_provider_jetstream.worker.job_run import JobRun
    from airflow_provider_jetstream.worker.metrics import ConsumerMetrics

    Ended: TypeAlias = tuple[DeliveryOutcome, Exception | None]

log = logging.getLogger("jetstream.worker")


class JobSettlement:
    """Ends the runs of one consumer's jobs.

    :param completions: stores their completions
    :param jobs: the jobs in flight
    """

    def __init__(
        self,
        connection: Connection,
        worker: str,
        completions: CompletionWriter,
        jobs: InFlightJobs,
        metrics: ConsumerMetrics,
    ) -> None:
        self._connection = connection
        self._worker = worker
        self.completions = completions
        self.jobs = jobs
        self._metrics = metrics
        self._done: list[JobRun] = []
        self._loop = asyncio.get_running_loop()
        self._stack = AsyncExitStack()
        self._stores = Confirmations(connection, completions.are_stored, self._on_stored, self._on_refused)
        # Whatever the server answers, it has taken the acknowledgement.
        self._acknowledgements = Confirmations(connection, _any, self._on_acknowledged, self._on_refused)

    async def __aenter__(self) -> Self:
        for confirmations in (self._stores, self._acknowledgements):
            await self._stack.enter_async_context(confirmations)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def repeat(self, run: JobRun) -> None:
        """Send the request of a run again that isn't confirmed in time."""
        run.answer_at = inf
        (self._acknowledgements if run.is_stored else self._stores).forget(run.request)
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
            self._end((run,), outcome, error)

    def _end(self, runs: Sequence[JobRun], outcome: DeliveryOutcome, error: Exception | None = None) -> None:
        self.jobs.end(runs, outcome)
        now, is_logged = self._loop.time(), is_outcome_logged(outcome)
        self._metrics.record_deliveries(outcome, [now - run.began for run in runs])
        if is_logged:
            for run in runs:
                log_outcome(self._worker, run.message, run.job, outcome, error, now - run.began)

    def store(self, run: JobRun) -> None:
        """Free the job's slot, and store its completion together with those of this turn of the event loop."""
        self.jobs.release(run)
        if not self._done:
            self._loop.call_soon(self._store)
        self._done.append(run)

    def _store(self) -> None:
        runs, self._done = self._done, []
        if not self.completions.has_events:
            self._on_stored(runs)
            return
        subjects, payloads, headers = self.completions.requests(runs)
        self._request(self._stores, runs, subjects, payloads, headers)

    def _on_stored(self, runs: Sequence[JobRun]) -> None:
        for run in runs:
            run.is_stored = True
        try:
            if reports := self.completions.reports(runs):
                self._connection.write(reports)
        except UnreachableError:
            for run in runs:
                run.is_stored = False
                self._on_refused(run)
            return
        reconnects = self._connection.reconnects
        for run in runs:
            if run.reconnects != reconnects:
                self._on_refused(run)
        if not (runs := [run for run in runs if run.reconnects == reconnects]):
            return
        subjects = [run.message.ack_subject for run in runs]
        self._request(self._acknowledgements, runs, subjects, [b"+ACK"] * len(runs))

    def _on_acknowledged(self, runs: Sequence[JobRun]) -> None:
        self._end(runs, DeliveryOutcome.COMPLETED)

    def _on_refused(self, run: JobRun) -> None:
        self.do(run, self._settle_again(run))

    def _request(
        self,
        confirmations: Confirmations[JobRun],
        runs: Sequence[JobRun],
        subjects: Sequence[bytes],
        payloads: Sequence[bytes],
        headers: Sequence[bytes] | None = None,
    ) -> None:
        try:
            numbers = confirmations.request(runs, subjects, payloads, headers)
        except UnreachableError:
            for run in runs:
                self._on_refused(run)
            return
        answer_at = self._loop.time() + ANSWER_TIMEOUT
        for run, number in zip(runs, numbers, strict=True):
            run.request = number
            run.answer_at = answer_at
            run.due = min(answer_at, run.signal_at)
        self.jobs.sweep.expect(min(run.due for run in runs))

    async def _settle_again(self, run: JobRun, *, drop_unsent: bool = False) -> Ended:
        """Repeat what isn't confirmed until it is; both requests may arrive twice."""
        run.answer_at = inf
        if drop_unsent:
            await self._connection.drop_unsent()
        if not run.is_stored:
            await self.completions.store(run.message, run.job, run.payload)
        await self._acknowledge(run, None)
        return DeliveryOutcome.COMPLETED, None

    async def acknowledge(self, run: JobRun) -> None:
        """Acknowledge a job, until that is confirmed."""
        await self._acknowledge(run, run.reconnects)

    async def _acknowledge(self, run: JobRun, reconnects: int | None) -> None:
        what = f"the acknowledgement of job {run.job.shown_id}"
        await end_delivery(self._connection, run.message, b"+ACK", what, reconnects=reconnects)


def _any(_: Sequence[bytes]) -> bool:
    return True
