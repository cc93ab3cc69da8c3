"""One delivery from its arrival to its end: run the handler, store the completion, only then acknowledge.

A failed job is nak'ed for its next delivery. A job that can't be done is left to :mod:`.dead_lettering`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.contract import JOB_DEADLINE, JOB_EXPIRES
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.jetstream.limits import TIME
from airflow_provider_jetstream.jetstream.line_text import one_line, shown_value
from airflow_provider_jetstream.jetstream.publishing.job_identity import redrives_of
from airflow_provider_jetstream.jetstream.units import parse_seconds, short_text
from airflow_provider_jetstream.worker.acknowledgement import ANSWER_TIMEOUT, Heartbeat, nak, send_until_confirmed
from airflow_provider_jetstream.worker.dead_lettering import error_text
from airflow_provider_jetstream.worker.delivery import Delivery
from airflow_provider_jetstream.worker.errors import (
    GiveUpError,
    HandlerCutOffError,
    JobExpiredError,
    NotDueError,
    RetryLaterError,
)
from airflow_provider_jetstream.worker.execute_at import seconds_until_due
from airflow_provider_jetstream.worker.handler import HandlerResult

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.cancellation.cache import CancellationCache
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.worker.completion import CompletionWriter
    from airflow_provider_jetstream.worker.dead_lettering import DeadLetterWriter
    from airflow_provider_jetstream.worker.metrics import ConsumerMetrics
    from airflow_provider_jetstream.worker.redelivery import RedeliveryPolicy
    from airflow_provider_jetstream.worker.runners import Supervisor

log = logging.getLogger("jetstream.worker")


class DeliveryOutcome(StrEnum):
    """How a delivery ended; the values are those of logs and metrics."""

    COMPLETED = "completed"
    RETRIED = "retried"
    """It failed, and the server delivers it again."""
    DEAD = "dead"
    """Its last delivery failed."""
    GIVEN_UP = "given_up"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    DELAYED = "delayed"
    """Its ``X-Execute-At`` is later; the server delivers it again at that time."""
    HANDED_BACK = "handed_back"
    """The worker stopped before the handler was done; the server delivers it to another worker at once."""
    LEFT = "left"
    """The worker stopped while the handler's thread was running; the server delivers it again after its ack wait."""
    UNSETTLED = "unsettled"
    """The server didn't confirm its acknowledgement; the server delivers it again after its ack wait."""


# Seconds; for less, a job that is due later isn't worth one of its deliveries.
_LONGEST_HOLD = 1.0

_LOG_LEVELS = {
    DeliveryOutcome.COMPLETED: logging.INFO,
    DeliveryOutcome.CANCELLED: logging.INFO,
    DeliveryOutcome.DELAYED: logging.INFO,
    DeliveryOutcome.HANDED_BACK: logging.INFO,
    DeliveryOutcome.UNSETTLED: logging.ERROR,
}


@dataclass(frozen=True, slots=True)
class JobExecutor:
    """Executes the jobs of one consumer.

    ``deadline`` is in seconds per attempt, ``None`` for none; ``execute_at_header`` says whether jobs may have a time
    before which they aren't started.
    """

    connection: Connection
    worker: str
    redelivery: RedeliveryPolicy
    supervisor: Supervisor
    dead_letters: DeadLetterWriter
    completions: CompletionWriter
    cancellations: CancellationCache
    metrics: ConsumerMetrics
    deadline: float | None
    execute_at_header: bool

    async def execute(self, message: Msg) -> None:
        """Run the handler for a pulled message, settle the delivery, and log its outcome."""
        started = time.monotonic()
        job = Delivery.of(message)
        heartbeat = Heartbeat(self.connection, message, self.redelivery.ack_wait_seconds(job.attempt))
        outcome, error = DeliveryOutcome.UNSETTLED, None
        try:
            outcome, error = await self._execute(message, job, heartbeat)
        except Exception as unsettled:
            error = unsettled
            raise
        finally:
            heartbeat.stop()
            self._log_outcome(message, job, outcome, error, time.monotonic() - started)

    async def _execute(
        self, message: Msg, job: Delivery, heartbeat: Heartbeat
    ) -> tuple[DeliveryOutcome, Exception | None]:
        result = await self._attempt(message, job)
        if result.cancelled and (cancellation := self.cancellations.get(job.id, message.metadata.timestamp)):
            await self.completions.store_cancellation(message, job, cancellation)
            await self._acknowledge(message, job)
            return DeliveryOutcome.CANCELLED, None
        match error := result.error:
            case None:
                await self.completions.store(message, job, result.value)
                await self._acknowledge(message, job)
                return DeliveryOutcome.COMPLETED, None
            case GiveUpError():
                return await self._terminate(message, job, error, heartbeat), error
            case HandlerCutOffError(ended=False):
                return DeliveryOutcome.LEFT, error
            case NotDueError():
                heartbeat.stop()
                await nak(self.connection, message, self.redelivery.nak_delay(error.seconds, job.attempt))
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
            heartbeat.stop()
            await nak(self.connection, message, delay)
        return (DeliveryOutcome.DEAD if self.redelivery.is_last(job.attempt) else outcome), error

    async def _attempt(self, message: Msg, job: Delivery) -> HandlerResult:
        """Run the handler; the value of a successful result is the encoded completion."""
        stored_at = message.metadata.timestamp
        with HandlerResult() as refusal:
            refusal.cancelled = self.cancellations.get(job.id, stored_at) is not None
            check_expiry(job, stored_at)
            wait = self._seconds_to_hold(job)
        if refusal.cancelled or refusal.error:
            return refusal
        cancelled = asyncio.ensure_future(self.cancellations.wait(job.id, stored_at))
        try:
            result = await self.supervisor.hold(wait, cancelled) if wait else None
            if result is None:
                result = await self.supervisor.run(job, attempt_seconds(job, self.deadline), cancelled)
        finally:
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
        if result.cancelled or result.error:
            return result
        with HandlerResult() as completion:
            completion.value = self.completions.payload(job, result.value)
        return completion

    def _seconds_to_hold(self, job: Delivery) -> float:
        """Return how long the worker itself waits until the job is due.

        :raises NotDueError: the server is to deliver it again when it is due
        """
        seconds = seconds_until_due(job) if self.execute_at_header else 0.0
        if seconds > _LONGEST_HOLD and not self.redelivery.is_last(job.attempt):
            raise NotDueError(seconds)
        return seconds

    async def _acknowledge(self, message: Msg, job: Delivery) -> None:
        acknowledge = partial(self.connection.request, message.reply, b"+ACK", time_limit=ANSWER_TIMEOUT)
        await send_until_confirmed(acknowledge, f"the acknowledgement of job {job.shown_id}")

    async def _terminate(
        self, message: Msg, job: Delivery, error: GiveUpError, heartbeat: Heartbeat
    ) -> DeliveryOutcome:
        if await self.dead_letters.terminate(message, error):
            return DeliveryOutcome.EXPIRED if isinstance(error, JobExpiredError) else DeliveryOutcome.GIVEN_UP
        heartbeat.stop()
        await nak(self.connection, message, self.redelivery.backoff_delay(job.attempt))
        return DeliveryOutcome.RETRIED

    def _log_outcome(
        self, message: Msg, job: Delivery, outcome: DeliveryOutcome, error: Exception | None, seconds: float
    ) -> None:
        self.metrics.record_delivery(outcome, seconds)
        level = _LOG_LEVELS.get(outcome, logging.WARNING)
        if not log.isEnabledFor(level):
            return
        fields: dict[str, Any] = {
            "worker": self.worker,
            "stream": message.metadata.stream,
            "consumer": message.metadata.consumer,
            "sequence": job.sequence,
            "job_id": job.shown_id,
            "attempt": job.attempt,
            "outcome": outcome.value,
            "seconds": round(seconds, 6),
        }
        reason = ""
        if error is not None:
            fields |= {"error": type(error).__name__, "code": getattr(error, "code", None)}
            reason = f": {one_line(error_text(error)) or 'no reason given'}"
        text = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
        # The errors of this package explain themselves; a handler's own errors need their traceback.
        trace = None if isinstance(error, JetStreamProviderError) else error
        log.log(level, "job ended %s%s", text, reason, extra={"job": fields}, exc_info=trace)


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


def check_expiry(job: Delivery, stored_at: datetime) -> None:
    """Refuse a job after the time in its ``Job-Expires`` header, unless it was redriven after that time.

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
    if not redriven_later and datetime.now(UTC) >= expires:
        raise JobExpiredError(f"the job expired at {expires.isoformat()}, before this attempt was started")


def _log_ignored(job: Delivery, header: str, expected: str, found: str) -> None:
    log.warning(
        "job %s, header %s is ignored: expected %s, found %s", job.shown_id, header, expected, shown_value(found)
    )
