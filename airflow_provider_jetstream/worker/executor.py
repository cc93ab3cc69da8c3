"""One delivery from its arrival to its end: run the handler, store the completion, only then acknowledge.

A job whose handler returns costs no task and no timer beyond the handler's own; :mod:`.settlement` ends it while the
next job runs in its slot. Whatever else happens (a failure, a deadline, a cancellation) is done by a task of the job's
own. A failed job is nak'ed for its next delivery. A job that can't be done is left to :mod:`.dead_lettering`.

Until the time in its header ``X-Execute-At`` a job stays in the queue: it is nak'ed with the time that is left as the
delay, which costs one of its deliveries, however long it is. The worker holds the job itself where the next delivery
would come within a moment, or where there is none: a nak of the last delivery makes a dead letter of a job that was
never started.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.client.stream_api import ServerClock
from airflow_provider_jetstream.jetstream.client.wire import encode_message
from airflow_provider_jetstream.jetstream.contract import EXECUTE_AT, JOB_DEADLINE, JOB_EXPIRES
from airflow_provider_jetstream.jetstream.errors import ApiError, TransientError, UnreachableError
from airflow_provider_jetstream.jetstream.limits import TIME
from airflow_provider_jetstream.jetstream.line_text import shown_value
from airflow_provider_jetstream.jetstream.publishing.job import redrives_of
from airflow_provider_jetstream.jetstream.units import parse_seconds, parse_time, short_text
from airflow_provider_jetstream.worker.acknowledgement import is_still_stored, nak
from airflow_provider_jetstream.worker.delivery import Delivery
from airflow_provider_jetstream.worker.errors import (
    GiveUpError,
    HandlerCutOffError,
    InvalidExecuteAtError,
    JobExpiredError,
    NotDueError,
    RetryLaterError,
)
from airflow_provider_jetstream.worker.handler import HandlerResult, as_exception, outcomes_of
from airflow_provider_jetstream.worker.in_flight import JobRun
from airflow_provider_jetstream.worker.logs import DeliveryOutcome
from airflow_provider_jetstream.worker.runners import result_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from airflow_provider_jetstream.jetstream.cancellation.cache import CancellationCache
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.worker.acknowledgement import RedeliveryPolicy
    from airflow_provider_jetstream.worker.attempts import AttemptWriter
    from airflow_provider_jetstream.worker.dead_lettering import DeadLetterWriter
    from airflow_provider_jetstream.worker.delivery import PulledMessage
    from airflow_provider_jetstream.worker.runners import HandlerRun, Supervisor
    from airflow_provider_jetstream.worker.settlement import Ended, JobSettlement

log = logging.getLogger("jetstream.worker")

_CLOCK_SECONDS: Final = 60.0
# Seconds; for less, a job that is due later isn't worth one of its deliveries.
_LONGEST_HOLD: Final = 1.0


class BatchCall:
    """One call of a batch handler: supervises it, and gives each job its own outcome.

    :param runs: the jobs, in the order in which the handler gets them
    :param on_outcome: takes a job and its result
    :param on_end: is called when the handler isn't waited for any more
    """

    def __init__(
        self,
        supervisor: Supervisor,
        runs: Sequence[JobRun],
        on_outcome: Callable[[JobRun, HandlerResult], None],
        on_end: Callable[[], None],
    ) -> None:
        self._supervisor = supervisor
        self._runs = runs
        self._on_outcome = on_outcome
        self._on_end = on_end
        self._began = runs[0].began
        limits = [run.seconds for run in runs if run.seconds is not None]
        self._seconds = min(limits, default=None)
        self._attempt: HandlerRun | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Call the handler."""
        jobs: list[Delivery] = [run.job for run in self._runs]
        with HandlerResult() as refusal:
            self._attempt = self._supervisor.start(jobs)
        if self._attempt is None:
            self._end(refusal)
            return
        result = self._attempt.result
        if result.done():
            self._on_result(result)
            return
        first = self._runs[0]
        if self._seconds is not None:
            # One of the jobs holds the deadline of the whole call.
            first.deadline_at = self._began + self._seconds
            first.due = min(first.due, first.deadline_at)
        for run in self._runs:
            run.call = self._supervise
        result.add_done_callback(self._on_result)

    def _supervise(self) -> None:
        if self._task is None and self._attempt and not self._attempt.result.done():
            self._task = asyncio.create_task(self._watch(self._attempt))

    async def _watch(self, attempt: HandlerRun) -> None:
        # A cancellation of one job doesn't end the call: its other jobs go on.
        never: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        first = self._runs[0].job
        self._end(await self._supervisor.supervise(first, attempt, self._seconds, never, began=self._began))

    def _on_result(self, future: asyncio.Future[Any]) -> None:
        if self._task is None:
            self._end(result_of(future))

    def _end(self, result: HandlerResult) -> None:
        self._runs[0].deadline_at = inf
        self._on_end()
        outcomes = result
        if result.error is None:
            with HandlerResult() as outcomes:
                outcomes.value = outcomes_of(result.value, len(self._runs))
        for position, run in enumerate(self._runs):
            run.call = None
            own = HandlerResult()
            if outcomes.error:
                own.error = outcomes.error
            elif isinstance(outcome := outcomes.value[position], BaseException):
                own.error = as_exception(outcome)
            else:
                own.value = outcome
            self._on_outcome(run, own)


def seconds_until_due(job: Delivery, now: datetime) -> float:
    """Return for how many seconds a job has to wait for its time; 0 where it has none.

    :param now: by the server's clock
    :raises InvalidExecuteAtError: its header is no time
    """
    text = job.headers.get(EXECUTE_AT)
    if text is None:
        return 0.0
    try:
        due = parse_time(text)
    except ValueError as error:
        raise InvalidExecuteAtError(f"header {EXECUTE_AT}: {error}; correct it and redrive the job") from None
    return max(0.0, (due - now).total_seconds())


def attempt_seconds(job: Delivery, worker_deadline: float | None) -> float | None:
    """Return the time limit of an attempt: the shorter of ``Job-Deadline`` and the worker's; ``None`` for no limit."""
    text = job.headers.get(JOB_DEADLINE)
    if text is None:
        return worker_deadline
    try:
        job_deadline = parse_seconds(text)
    except ValueError:
        job_deadline = 0
    if not job_deadline:
        _log_ignored(job, JOB_DEADLINE, 'seconds or a duration such as "5m", more than 0', text)
        return worker_deadline
    return job_deadline if worker_deadline is None else min(job_deadline, worker_deadline)


class QueueClock:
    """The time by a queue's server: this machine's clock may be off by days. It is asked once a minute at most."""

    def __init__(self, connection: Connection, queue: str) -> None:
        self._connection = connection
        self._queue = queue
        self._clock: ServerClock | None = None
        self._reading = asyncio.Lock()

    async def now(self) -> datetime:
        """Return the time.

        :raises JetStreamProviderError: the server doesn't tell it
        """
        async with self._reading:
            if self._clock is None or time.monotonic() - self._clock.read_at > _CLOCK_SECONDS:
                self._clock = await ServerClock.read(self._connection, self._queue)
            return self._clock.now()


def check_expiry(job: Delivery, stored_at: datetime, now: datetime) -> None:
    """Refuse a job after the time in its ``Job-Expires`` header, unless it was redriven after that time.

    :param now: by the server's clock
    :raises JobExpiredError: the job has expired
    """
    text = job.headers.get(JOB_EXPIRES)
    if text is None:
        return
    try:
        expires = datetime.fromisoformat(short_text(text, TIME))
    except ValueError:
        _log_ignored(job, JOB_EXPIRES, 'a time such as "2026-11-21T09:00:00Z"', text)
        return
    if expires.tzinfo is None:
        expires = expires.replace(tzinfo=UTC)
    redriven_later = redrives_of(job.headers.items()) > 0 and stored_at >= expires
    if not redriven_later and now >= expires:
        raise JobExpiredError(f"the job expired at {expires.isoformat()}, before this attempt was started")


def _log_ignored(job: Delivery, header: str, expected: str, found: str) -> None:
    log.warning(
        "job %s, header %s is ignored: expected %s, found %s", job.shown_id, header, expected, shown_value(found)
    )


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
    attempts: AttemptWriter

    def start(self, message: PulledMessage, requested_at: float) -> None:
        """Start a pulled job; it is settled, and its outcome logged, in the background.

        :param requested_at: a time of the event loop before its delivery
        """
        run = self._begin(message, requested_at)
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

    def start_batch(self, jobs: Sequence[tuple[PulledMessage, float]]) -> None:
        """Start pulled jobs in one call of a batch handler; jobs that may be refused are checked one by one first.

        :param jobs: each with a time of the event loop before its delivery
        """
        runs = []
        for message, requested_at in jobs:
            run = self._begin(message, requested_at)
            if self._may_be_refused(run.job):
                self.settlement.jobs.take_slot(run)
                self.settlement.do(run, self._execute(run))
            else:
                runs.append(run)
        if runs:
            in_flight = self.settlement.jobs
            in_flight.use_slot()
            call = BatchCall(self.supervisor, runs, self._on_outcome, in_flight.free_slot)
            call.start()
            in_flight.sweep.expect(runs[0].due)

    def _begin(self, message: PulledMessage, requested_at: float) -> JobRun:
        job, now = Delivery.of(message), asyncio.get_running_loop().time()
        ack_wait = self.redelivery.ack_wait_seconds(job.attempt)
        run = JobRun(self, message, job, ack_wait, attempt_seconds(job, self.deadline), now)
        run.requested_at, run.reconnects = requested_at, self.connection.reconnects
        self.attempts.follow(run)
        self.settlement.jobs.add(run)
        return run

    def on_due(self, run: JobRun, now: float) -> None:
        """Signal that a job is in progress, end its handler, or send an unconfirmed request again."""
        if now >= run.signal_at:
            run.signal_at = now + run.interval
            self._signal(run)
        if now >= run.progress_at:
            run.progress_at = inf
            self.attempts.send_progress(run)
        if now >= run.deadline_at:
            run.deadline_at = inf
            self.supervise(run)
        if now >= run.answer_at:
            self.settlement.repeat(run)

    def expect(self, run: JobRun) -> None:
        """Note that something of a run is due sooner than before."""
        self.settlement.jobs.sweep.expect(run.due)

    def supervise(self, run: JobRun) -> None:
        """End the handler of a run where its deadline, a cancellation or the worker's end asks for that."""
        if run.call is not None:
            run.call()
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
                self.attempts.finish(run)
                self.settlement.store(run)
                return
            self._encode(run.job, result)
        if result.error is None:
            run.payload = result.value
            self.attempts.finish(run)
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
        if result.error is None:
            self.attempts.finish(run)
        message, job, progress = run.message, run.job, run.end_progress()
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
                await self.attempts.store_failure(run, error, _seconds_of(run), progress)
                return await self._terminate(run, error), error
            case HandlerCutOffError(ended=False):
                return DeliveryOutcome.LEFT, error
            case NotDueError():
                await self.attempts.store_failure(run, error, _seconds_of(run), progress)
                run.stop_signals()
                await self._nak(run, self.redelivery.nak_delay(error.seconds, job.attempt))
                return DeliveryOutcome.DELAYED, None
            case HandlerCutOffError():
                delay, outcome = self.redelivery.nak_delay(0, job.attempt), DeliveryOutcome.HANDED_BACK
            case RetryLaterError():
                delay, outcome = self.redelivery.nak_delay(error.seconds, job.attempt), DeliveryOutcome.RETRIED
            case _:
                delay, outcome = self.redelivery.backoff_delay(job.attempt), DeliveryOutcome.RETRIED
        wait = await self.attempts.wait_after(run, self.redelivery, delay, self.clock.now)
        record = await self.attempts.store_failure(run, error, _seconds_of(run), progress)
        try:
            await self.dead_letters.record_failure(message, error, _seconds_of(run))
        finally:
            run.stop_signals()
            is_confirmed = await self._nak(run, delay)
        if record and wait and is_confirmed:
            await self.attempts.store_wait(run, record, wait)
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
        if await self.dead_letters.terminate(run.message, error, _seconds_of(run)):
            return DeliveryOutcome.EXPIRED if isinstance(error, JobExpiredError) else DeliveryOutcome.GIVEN_UP
        run.stop_signals()
        await self._nak(run, self.redelivery.backoff_delay(run.job.attempt))
        return DeliveryOutcome.RETRIED

    async def _nak(self, run: JobRun, delay: int | None) -> bool:
        """Nak a job, and return whether the server has confirmed it."""
        try:
            if run.reconnects == self.connection.reconnects or await is_still_stored(self.connection, run.message):
                return await nak(self.connection, run.message, delay)
        except (ApiError, TransientError) as error:
            log.warning("the nak of job %d isn't sent: %s", run.message.sequence, error)
        return False


def _seconds_of(run: JobRun) -> float:
    return max(0.0, asyncio.get_running_loop().time() - run.began)
