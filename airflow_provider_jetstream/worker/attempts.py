"""Stores what is known of the attempts at one consumer's jobs: how far each is, and how it failed.

Progress is stored at most once a second of a job and isn't confirmed; an error is confirmed before the job is nak'ed or
terminated. Neither prolongs a delivery: a job goes on where they can't be stored.

Once the server has confirmed the nak, the time is stored before which it doesn't deliver the job again. That is certain
only where the nak was confirmed within the ack wait, counted from the sending of the pull request that delivered the
job: later another worker may have the job, and the server applies the nak to that worker's delivery.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.client.publish_ack import PubAck, store
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.client.wire import encode_message, encode_subject
from airflow_provider_jetstream.jetstream.contract import attempt_subject, consumer_attempt_filter
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, NotFoundError, UnreachableError
from airflow_provider_jetstream.jetstream.limits import SHOWN_VALUE
from airflow_provider_jetstream.jetstream.line_text import one_line
from airflow_provider_jetstream.worker.acknowledgement import ANSWER_TIMEOUT
from airflow_provider_jetstream.worker.handler import class_name, error_text, failure_of
from airflow_provider_jetstream.worker.in_flight import JobProgress

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.worker.acknowledgement import RedeliveryPolicy
    from airflow_provider_jetstream.worker.in_flight import JobRun

log = logging.getLogger("jetstream.worker")

_TYPE: Final = "io.airflow.jetstream.v1.attempt"


@dataclass(frozen=True, slots=True)
class NextDelivery:
    """When the server delivers a job again that is about to be nak'ed, if it confirms that in time.

    :param until: not before this time, by the server's clock
    :param requested_at: a time before the last delivery, by the server's clock
    :param ack_wait: the seconds that a worker has for the last delivery
    :param due: when these seconds are over, by the event loop's clock, or somewhat before
    """

    until: datetime
    requested_at: datetime
    ack_wait: float
    due: float


class AttemptWriter:
    """Stores the attempts of one consumer; nothing where the queue declares no attempts.

    :ivar is_enabled: whether it stores anything
    """

    def __init__(self, connection: Connection, queue: WorkQueue, consumer: str, worker: str) -> None:
        self._connection = connection
        self._queue = queue
        self._consumer = consumer
        self._worker = worker
        self.is_enabled = False

    async def open(self) -> None:
        """Check whether the attempts stream captures attempts of this consumer; a worker goes on without it."""
        if self._queue.attempts is None:
            return
        name, captured = self._queue.attempts.name, consumer_attempt_filter(self._queue.name, self._consumer)
        try:
            subjects = (await stream_info(self._connection, name))["config"].get("subjects") or []
            problem = "" if covered_by_any(subjects, captured) else f"{name} doesn't capture {captured}"
        except NotFoundError as error:
            problem = str(error)
        self.is_enabled = not problem
        if problem:
            log.warning(
                "progress and errors of attempts at jobs of %s aren't stored: %s; provision the queue, and start"
                " workers again",
                self._queue.name,
                problem,
            )

    def follow(self, run: JobRun) -> None:
        """Let the handler of a run report progress."""
        if self.is_enabled:
            run.progress = JobProgress(run)
            run.job.report_to(run.progress)

    def finish(self, run: JobRun) -> None:
        """Send the last progress of a handler that has returned, unless some was sent within the last second."""
        if run.progress is not None and run.progress.is_due:
            self.send_progress(run)
        run.end_progress()

    def send_progress(self, run: JobRun) -> None:
        """Send the progress of a run, unconfirmed."""
        # Sent while the connection is lost it would arrive late, after what another worker has stored.
        if run.progress is None or not self._connection.is_connected:
            return
        subject = attempt_subject(self._queue.name, self._consumer, run.job.sequence, run.job.attempt)
        body = _encode(self._values(run, run.progress.take()))
        try:
            self._connection.write(encode_message(encode_subject(subject), body))
        except UnreachableError as error:
            log.debug("the progress of job %s was not sent: %s", run.job.shown_id, error)

    async def wait_after(
        self, run: JobRun, redelivery: RedeliveryPolicy, delay: int | None, clock: Callable[[], Awaitable[datetime]]
    ) -> NextDelivery | None:
        """Return when a job comes back that is nak'ed from now on; ``None`` where that isn't certain, or is at once.

        :param delay: of the nak, in nanoseconds
        :param clock: returns the server's time, perhaps somewhat early
        """
        wait, ack_wait = redelivery.wait_seconds(delay, run.job.attempt), redelivery.ack_wait_seconds(run.job.attempt)
        if not self.is_enabled or not wait:
            return None
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT):
                now = await clock()
        except (JetStreamProviderError, TimeoutError):
            return None
        due = run.requested_at + ack_wait
        requested_at = now - timedelta(seconds=asyncio.get_running_loop().time() - run.requested_at)
        return NextDelivery(now + timedelta(seconds=wait), requested_at, ack_wait, due)

    async def store_failure(
        self, run: JobRun, error: Exception, seconds: float, progress: tuple[float, str] | None
    ) -> tuple[PubAck, dict[str, Any]] | None:
        """Store how an attempt failed, and return the PubAck and what is stored; what prevents that is logged only.

        :param seconds: how long it took
        :param progress: what its handler reported last
        """
        if not self.is_enabled:
            return None
        failure = failure_of(error)
        values = self._values(
            run,
            progress,
            failed=True,
            seconds=round(seconds, 3),
            error_class=_short(class_name(type(error))),
            error_message=one_line(error_text(error)),
            error_place=_short(failure.place if failure else None),
        )
        ack = await self._store(run, values)
        return (ack, values) if ack else None

    async def store_wait(self, run: JobRun, record: tuple[PubAck, dict[str, Any]], wait: NextDelivery) -> None:
        """Store when a job comes back whose nak has just been confirmed, unless that may have come too late.

        :param record: what :meth:`store_failure` has returned
        """
        if asyncio.get_running_loop().time() >= wait.due:
            return
        ack, values = record
        values |= {
            "waits_until": wait.until.isoformat(),
            "requested_at": wait.requested_at.isoformat(),
            "ack_wait": wait.ack_wait,
        }
        await self._store(run, values, {"Nats-Expected-Last-Subject-Sequence": str(ack.sequence)})

    async def _store(self, run: JobRun, values: dict[str, Any], headers: dict[str, str] | None = None) -> PubAck | None:
        subject = attempt_subject(self._queue.name, self._consumer, run.job.sequence, run.job.attempt)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT):
                return await store(self._connection, subject, _encode(values), headers, time_limit=ANSWER_TIMEOUT)
        except (JetStreamProviderError, TimeoutError) as problem:
            log.warning(
                "how attempt %d at job %s failed isn't stored: %s",
                *(run.job.attempt, run.job.shown_id, problem or "the server gave no answer in time"),
            )
            return None

    def _values(self, run: JobRun, progress: tuple[float, str] | None, **fields: Any) -> dict[str, Any]:
        fraction, text = progress or (None, "")
        values = {
            "type": _TYPE,
            "timestamp": datetime.now(UTC).isoformat(),
            "stream": self._queue.name,
            "consumer": self._consumer,
            "stream_seq": run.job.sequence,
            "deliveries": run.job.attempt,
            "worker": one_line(self._worker),
            "fraction": fraction,
            "text": text or None,
            **fields,
        }
        return {name: value for name, value in values.items() if value is not None}


def _encode(values: dict[str, Any]) -> bytes:
    return json.dumps(values, ensure_ascii=False, allow_nan=False).encode(errors="replace")


def _short(text: str | None) -> str | None:
    return (one_line(text) or "")[:SHOWN_VALUE].rstrip() or None
