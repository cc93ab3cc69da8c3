"""One delivery from its arrival to its end: run the handler, store the completion, only then acknowledge.

A job whose handler returns costs no task and no timer beyond the handler's own; :mod:`.settlement` ends it while the
next job runs in its slot. Whatever else happens (a failure, a deadline, a cancellation) is done by a task of the job's
own. A failed job is nak'ed for its next delivery. A job that can't be done is left to :mod:`.dead_lettering`.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.client.wire import encode_message
from airflow_provider_jetstream.jetstream.contract import EXECUTE_AT, JOB_EXPIRES
from airflow_provider_jetstream.jetstream.errors import ApiError, TransientError, UnreachableError
from airflow_provider_jetstream.worker.acknowledgement import is_still_stored, nak
from airflow_provider_jetstream.worker.batch_call import BatchCall
from airflow_provider_jetstream.worker.delivery import Delivery
from airflow_provider_jetstream.worker.delivery_outcome import DeliveryOutcome
from airflow_provider_jetstream.worker.errors import (
    GiveUpError,
    HandlerCutOffError,
    JobExpiredError,
    NotDueError,
    RetryLaterError,
)
from airflow_provider_jetstream.worker.execute_at import seconds_until_due
from airflow_provider_jetstream.worker.handler import HandlerResult
from airflow_provider_jetstream.worker.job_run import JobRun
from airflow_provider_jetstream.worker.runners import result_of
from airflow_provider_jetstream.worker.time_limits import QueueClock, attempt_seconds, check_expiry

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.cancellation.cache import CancellationCache
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.worker.dead_lettering import DeadLetterWriter
    from airflow_provider_jetstream.worker.pulled_message import PulledMessage
    from airflow_provider_jetstream.worker.redelivery import RedeliveryPolicy
    from airflow_provider_jetstream.worker.runners import Supervisor
    from airflow_provider_jetstream.worker.settlement import Ended, JobSettlement


log = logging.getLogger("jetstream.worker")

# Seconds; for less, a job that is due later isn't worth one of its deliveries.
_LONGEST_HOLD: Final = 1.0


@dataclass(frozen=True, slots=True)
class JobExecutor:
    """Executes the jobs of one consumer.

    ``deadline`` is in seconds per attempt, ``None`` for none; ``execute_at_header`` says whether jobs may have a time
    before which they aren't started, by ``clock``.
    """

    connection: Connection
    redelivery: RedeliveryPolicy
    supervisor: Supervisor
    dead_letters: DeadLetterWriter
    settlement: JobSettlement
    cancellations: CancellationCache
    deadline: float | None
    execute_at_header: bool
    clock: QueueClock

    def start(self, message: PulledMessage) -> None:
        """Start a pulled job; it is settled, and its outcome logged, in the background."""
        run = self._begin(message)
        self.settlement.jobs.take_slot(run)
        if not self.supervisor.starts_at_once or self._may_be_refused(run.job):
            self.settlement.do(run, self._execute(run))
            return
        try:
            run.attempt = self.supervisor.start(run.job)
        except BaseException as error:  # noqa: BLE001 - the operating system may have no more threads
            self.settlement.do(run, self._conclude(run, HandlerResult.of_error(error)))
            return
        result = run.attempt.result
        if result.done():
            self._on_result(run, result)
            return
        if run.seconds is not None:
            run.deadline_at = run.began + run.seconds
            if run.deadline_at < run.due:
                run.due = run.deadline_at
                self.settlement.jobs.sweep.expect(run.due)
        result.add_done_callback(partial(self._on_result, run))

    def start_batch(self, messages: Sequence[PulledMessage]) -> None:
        """Start pulled jobs in one call of a batch handler; those that may be refused are looked at one by one."""
        runs = []
        for message in messages:
            run = self._begin(message)
            if self._may_be_refused(run.job):
                self.settlement.jobs.take_slot(run)
                self.settlement.do(run, self._execute(run))
            else:
                runs.append(run)
        if runs:
            jobs = self.settlement.jobs
            jobs.use_slot()
            call = BatchCall(self.supervisor, runs, self._on_outcome, jobs.free_slot)
            call.start()
            jobs.sweep.expect(runs[0].due)

    def _begin(self, message: PulledMessage) -> JobRun:
        job, now = Delivery.of(message), asyncio.get_running_loop().time()
        ack_wait = self.redelivery.ack_wait_seconds(job.attempt)
        run = JobRun(self, message, job, ack_wait, attempt_seconds(job, self.deadline), now)
        run.reconnects = self.connection.reconnects
        self.settlement.jobs.add(run)
        return run

    def on_due(self, run: JobRun, now: float) -> None:
        """Signal that a job is in progress, end its handler, or send an unconfirmed request again."""
        if now >= run.signal_at:
            run.signal_at = now + run.interval
            self._signal(run)
        if now >= run.deadline_at:
            run.deadline_at = inf
            self.supervise(run)
        if now >= run.answer_at:
            self.settlement.repeat(run)

    def supervise(self, run: JobRun) -> None:
        """End the handler of a run where its deadline, a cancellation or the worker's end asks for that."""
        if run.call is not None:
            run.call.supervise()
        elif run.task is None and run.attempt is not None and not run.attempt.result.done():
            self.settlement.do(run, self._execute(run))

    def _may_be_refused(self, job: Delivery) -> bool:
        return self._has_time(job) or self.cancellations.has(job.id, job.sequence)

    def _has_time(self, job: Delivery) -> bool:
        return JOB_EXPIRES in job.headers or (self.execute_at_header and EXECUTE_AT in job.headers)

    def _signal(self, run: JobRun) -> None:
        # A signal sent while the connection is lost would arrive late, when another worker may have the job.
        if self.connection.is_connected:
            try:
                self.connection.write(encode_message(run.message.ack_subject, b"+WPI"))
            except UnreachableError as error:
                log.debug("the in-progress signal for %s was not sent: %s", run.message.reply, error)

    def _on_result(self, run: JobRun, future: asyncio.Future[Any]) -> None:
        if run.task is not None:
            return
        run.deadline_at = inf
        self._on_outcome(run, result_of(future))

    def _on_outcome(self, run: JobRun, result: HandlerResult) -> None:
        if result.error is None:
            if result.value is None and self.settlement.completions.has_plain_form(run.job):
                self.settlement.store(run)
                return
            self._encode(run.job, result)
        if result.error is None:
            run.payload = result.value
            self.settlement.store(run)
        else:
            self.settlement.do(run, self._conclude(run, result))

    def _encode(self, job: Delivery, result: HandlerResult) -> None:
        """Replace the value of a successful result by the encoded completion."""
        if not (result.cancelled or result.error):
            with result:
                result.value = self.settlement.completions.payload(job, result.value)

    async def _execute(self, run: JobRun) -> Ended:
        return await self._conclude(run, await self._attempt(run))

    async def _conclude(self, run: JobRun, result: HandlerResult) -> Ended:
        """Settle a job; the value of a successful result is the encoded completion."""
        message, job = run.message, run.job
        if result.cancelled and (cancellation := self.cancellations.get(job.id, message.stored_at, job.sequence)):
            await self.settlement.completions.store_cancellation(message, job, cancellation)
            await self.settlement.acknowledge(run)
            return DeliveryOutcome.CANCELLED, None
        match error := result.error:
            case None:
                self.settlement.jobs.release(run)
                await self.settlement.completions.store(message, job, result.value)
                await self.settlement.acknowledge(run)
                return DeliveryOutcome.COMPLETED, None
            case GiveUpError():
                return await self._terminate(run, error), error
            case HandlerCutOffError(ended=False):
                return DeliveryOutcome.LEFT, error
            case NotDueError():
                run.stop_signals()
                await self._nak(run, self.redelivery.nak_delay(error.seconds, job.attempt))
                return DeliveryOutcome.DELAYED, None
            case HandlerCutOffError():
                delay, outcome = self.redelivery.nak_delay(0, job.attempt), DeliveryOutcome.HANDED_BACK
            case RetryLaterError():
                delay, outcome = self.redelivery.nak_delay(error.seconds, job.attempt), DeliveryOutcome.RETRIED
            case _:
                delay, outcome = self.redelivery.backoff_delay(job.attempt), DeliveryOutcome.RETRIED
        try:
            await self.dead_letters.record_failure(message, error)
        finally:
            run.stop_signals()
            await self._nak(run, delay)
        return (DeliveryOutcome.DEAD if self.redelivery.is_last(job.attempt) else outcome), error

    async def _attempt(self, run: JobRun) -> HandlerResult:
        """Run the handler, or watch over the one that runs; the value of its result is the encoded completion."""
        job, stored_at, wait = run.job, run.message.stored_at, 0.0
        if run.attempt is None:
            now = await self.clock.now() if self._has_time(job) else stored_at
            with HandlerResult() as refusal:
                refusal.cancelled = self.cancellations.get(job.id, stored_at, job.sequence) is not None
                check_expiry(job, stored_at, now)
                wait = self._seconds_to_hold(job, now)
            if refusal.cancelled or refusal.error:
                return refusal
        cancelled = asyncio.ensure_future(self.cancellations.wait(job.id, stored_at, job.sequence))
        try:
            result = await self.supervisor.hold(wait, cancelled) if wait else None
            if result is None:
                result = await (
                    self.supervisor.supervise(job, run.attempt, run.seconds, cancelled, began=run.began)
                    if run.attempt
                    else self.supervisor.run(job, run.seconds, cancelled)
                )
        finally:
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
        self._encode(job, result)
        return result

    def _seconds_to_hold(self, job: Delivery, now: datetime) -> float:
        """Return how long the worker itself waits until the job is due.

        :raises NotDueError: the server is to deliver it again when it is due
        """
        seconds = seconds_until_due(job, now) if self.execute_at_header else 0.0
        if seconds > _LONGEST_HOLD and not self.redelivery.is_last(job.attempt):
            raise NotDueError(seconds)
        return seconds

    async def _terminate(self, run: JobRun, error: GiveUpError) -> DeliveryOutcome:
        if await self.dead_letters.terminate(run.message, error):
            return DeliveryOutcome.EXPIRED if isinstance(error, JobExpiredError) else DeliveryOutcome.GIVEN_UP
        run.stop_signals()
        await self._nak(run, self.redelivery.backoff_delay(run.job.attempt))
        return DeliveryOutcome.RETRIED

    async def _nak(self, run: JobRun, delay: int | None) -> None:
        try:
            if run.reconnects == self.connection.reconnects or await is_still_stored(self.connection, run.message):
                await nak(self.connection, run.message, delay)
        except (ApiError, TransientError) as error:
            log.warning("the nak of job %d isn't sent: %s", run.message.sequence, error)
