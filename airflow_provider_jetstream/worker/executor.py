"""One delivery from its arrival to its end: run the handler, store the completion, only then acknowledge.

What fails is handed back for its next delivery. What can't be done is left to :mod:`.giving_up`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.dead_letters.record import one_line
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.worker.acknowledgement import ANSWER_SECONDS, nak, send_until_confirmed
from airflow_provider_jetstream.worker.dead_lettering import text_of
from airflow_provider_jetstream.worker.deadlines import attempt_seconds, check_expiry
from airflow_provider_jetstream.worker.delivery import Delivery
from airflow_provider_jetstream.worker.errors import GiveUpError, HandlerCutOffError, JobExpiredError, RetryLaterError
from airflow_provider_jetstream.worker.heartbeat import Heartbeat
from airflow_provider_jetstream.worker.result import Outcome

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.cancellation.cache import CancellationCache
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.worker.completion import CompletionStore
    from airflow_provider_jetstream.worker.dead_lettering import DeadLetterWriter
    from airflow_provider_jetstream.worker.metrics import ConsumerMetrics
    from airflow_provider_jetstream.worker.redelivery import RedeliveryPolicy
    from airflow_provider_jetstream.worker.runners import Supervisor

log = logging.getLogger("jetstream.worker")


class DeliveryOutcome(StrEnum):
    """What became of a delivery."""

    COMPLETED = "completed"
    RETRIED = "retried"
    """It comes back."""
    DEAD = "dead"
    """It failed for the last time."""
    GIVEN_UP = "given_up"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    HANDED_BACK = "handed_back"
    """The worker had no time for it; another one has."""
    LEFT = "left"
    """The worker couldn't wait for its handler, which didn't end; it comes back when its ack wait is over."""
    UNSETTLED = "unsettled"
    """The server didn't confirm its end; it comes back when its ack wait is over."""


_LEVELS = {
    DeliveryOutcome.COMPLETED: logging.INFO,
    DeliveryOutcome.CANCELLED: logging.INFO,
    DeliveryOutcome.HANDED_BACK: logging.INFO,
    DeliveryOutcome.UNSETTLED: logging.ERROR,
}


@dataclass(frozen=True, slots=True)
class JobExecutor:
    """Does the jobs of one consumer.

    :param connection: the server
    :param worker: the worker's name
    :param rules: how the server treats deliveries
    :param supervisor: runs the handler
    :param letters: keeps what can't be done
    :param completions: tells what was done
    :param cancellations: knows which jobs are cancelled
    :param metrics: counts
    :param deadline: seconds for an attempt; ``None`` for any time
    """

    connection: Connection
    worker: str
    rules: RedeliveryPolicy
    supervisor: Supervisor
    letters: DeadLetterWriter
    completions: CompletionStore
    cancellations: CancellationCache
    metrics: ConsumerMetrics
    deadline: float | None

    async def execute(self, message: Msg) -> None:
        """Do a job, and log the end of it.

        :param message: the job as it was pulled
        """
        started = time.monotonic()
        job = Delivery.of(message)
        keepalive = Heartbeat(self.connection, message, self.rules.ack_wait_limit(job.attempt))
        end, error = DeliveryOutcome.UNSETTLED, None
        try:
            end, error = await self._execute(message, job, keepalive)
        except Exception as unsettled:
            error = unsettled
            raise
        finally:
            keepalive.stop()
            self._tell(message, job, end, error, time.monotonic() - started)

    async def _execute(
        self, message: Msg, job: Delivery, keepalive: Heartbeat
    ) -> tuple[DeliveryOutcome, Exception | None]:
        outcome = await self._attempt(message, job)
        if outcome.cancelled and (found := self.cancellations.of(job.id, message.metadata.timestamp)):
            await self.completions.store_cancelled(message, job, found)
            await send_until_confirmed(
                partial(message.ack_sync, timeout=ANSWER_SECONDS), f"the acknowledgement of job {job.id}"
            )
            return DeliveryOutcome.CANCELLED, None
        match error := outcome.error:
            case None:
                await self.completions.store(message, job, outcome.value)
                await send_until_confirmed(
                    partial(message.ack_sync, timeout=ANSWER_SECONDS), f"the acknowledgement of job {job.id}"
                )
                return DeliveryOutcome.COMPLETED, None
            case GiveUpError():
                return await self._give_up(message, job, error, keepalive), error
            case HandlerCutOffError(ended=False):
                return DeliveryOutcome.LEFT, error
            case HandlerCutOffError():
                delay, otherwise = self.rules.after(0, job.attempt), DeliveryOutcome.HANDED_BACK
            case RetryLaterError():
                delay, otherwise = self.rules.after(error.seconds, job.attempt), DeliveryOutcome.RETRIED
            case _:
                delay, otherwise = self.rules.after_backoff(job.attempt), DeliveryOutcome.RETRIED
        try:
            await self.letters.failed(message, error)
        finally:
            keepalive.stop()
            await nak(self.connection, message, delay)
        return (DeliveryOutcome.DEAD if self.rules.is_last(job.attempt) else otherwise), error

    async def _attempt(self, message: Msg, job: Delivery) -> Outcome:
        """Run the handler, and write the completion if it was successful."""
        stored_at = message.metadata.timestamp
        with Outcome() as start:
            start.cancelled = self.cancellations.of(job.id, stored_at) is not None
            check_expiry(job, stored_at)
        if start.cancelled or start.error:
            return start
        cancelled = asyncio.ensure_future(self.cancellations.wait(job.id, stored_at))
        try:
            done = await self.supervisor.run(job, attempt_seconds(job, self.deadline), cancelled)
        finally:
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
        if done.cancelled or done.error:
            return done
        with Outcome() as written:
            written.value = self.completions.payload(job, done.value)
        return written

    async def _give_up(self, message: Msg, job: Delivery, error: GiveUpError, keepalive: Heartbeat) -> DeliveryOutcome:
        if await self.letters.give_up(message, error):
            return DeliveryOutcome.EXPIRED if isinstance(error, JobExpiredError) else DeliveryOutcome.GIVEN_UP
        keepalive.stop()
        await nak(self.connection, message, self.rules.after_backoff(job.attempt))
        return DeliveryOutcome.RETRIED

    def _tell(self, message: Msg, job: Delivery, end: DeliveryOutcome, error: Exception | None, seconds: float) -> None:
        self.metrics.ended(end, seconds)
        level = _LEVELS.get(end, logging.WARNING)
        if not log.isEnabledFor(level):
            return
        fields: dict[str, Any] = {
            "worker": self.worker,
            "stream": message.metadata.stream,
            "consumer": message.metadata.consumer,
            "sequence": job.sequence,
            "job_id": job.id,
            "attempt": job.attempt,
            "outcome": end.value,
            "seconds": round(seconds, 6),
        }
        why = ""
        if error is not None:
            fields |= {"error": type(error).__name__, "code": getattr(error, "code", None)}
            why = f": {one_line(text_of(error)) or 'no reason given'}"
        told = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
        # Our own errors say all there is to say; a handler's need the place where they were raised.
        trace = None if isinstance(error, JetStreamProviderError) else error
        log.log(level, "job ended %s%s", told, why, extra={"job": fields}, exc_info=trace)
