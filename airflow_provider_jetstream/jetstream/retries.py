"""Delivers a job at once that waits for its next delivery, or gives it up; refused unless the job certainly waits.

The server tells nobody whether a job waits or runs, and it applies a nak to whichever delivery there is: one that
reaches a running job has it run twice. So the proof is what the worker stored when it failed: a time before which the
server doesn't deliver the job again. It is believed while the server, the consumer and its settings are those of then.

Protocol (measured with nats-server 2.10.27, 2.12.8 and 2.15.1): a nak without a delay on ``$JS.ACK.….1.<seq>.1.0.0``
delivers a waiting job at once, whatever its delay; of a running job, even with the numbers of an earlier delivery, it
makes another delivery. Several before the next pull make one. Who asks first replaces the worker's message under the
condition that it is still the last one of its subject; so of two requests one is refused.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from airflow_provider_jetstream.jetstream.attempts import ASKED_WORDS
from airflow_provider_jetstream.jetstream.client.publish_ack import WRONG_LAST_SEQUENCE, store, store_once
from airflow_provider_jetstream.jetstream.client.stream_api import ServerClock, consumer_info, stream_info
from airflow_provider_jetstream.jetstream.client.streams import get_message, last_message
from airflow_provider_jetstream.jetstream.contract import copy_subject, job_attempt_filter, late_ack_subject
from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
from airflow_provider_jetstream.jetstream.dead_letters.record import is_copy_of, record_headers
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    JobNotWaitingError,
    NotFoundError,
    QueueDeclarationError,
    RedriveError,
)
from airflow_provider_jetstream.jetstream.evidence import attempt_of
from airflow_provider_jetstream.jetstream.line_text import one_line
from airflow_provider_jetstream.jetstream.queue.server_uptime import server_up_since
from airflow_provider_jetstream.jetstream.task_values import TaskReport
from airflow_provider_jetstream.jetstream.units import NANOSECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.advisories import ReportedAttempt
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

Asked: TypeAlias = Literal["retry", "give_up"]

# A request that the network holds back for longer could reach the next delivery.
MARGIN: Final = timedelta(seconds=5)
_REQUEST_SECONDS: Final = 2.0
_DEFAULT_ACK_WAIT: Final = 30 * NANOSECONDS
_WRITER: Final = "person"


@dataclass(frozen=True, slots=True)
class RetryReport(TaskReport):
    """What was done with a job that waited.

    :param sequence: the job's stream sequence
    :param asked: ``retry`` where the server delivers it at once, ``give_up`` where it is a dead letter now
    :param attempt: which delivery was the last one by then
    :param waited_until: before this time it wouldn't have been delivered again
    """

    sequence: int
    asked: Asked
    attempt: int
    waited_until: datetime


@dataclass(frozen=True, slots=True)
class WaitFacts:
    """What decides whether a job certainly waits, as of one moment.

    :param stored_at: when the job was stored; ``None`` where it isn't stored
    :param attempt: what a worker has stored last of an attempt at it; ``None`` where none did
    :param attempt_at: when that was stored
    :param consumer: the server's CONSUMER.INFO of the attempt's consumer; ``None`` where it doesn't exist
    :param up_since: since when the server that keeps the consumer's state certainly wasn't restarted; ``None`` where
        that isn't known
    :param now: by the server's clock, or somewhat later
    """

    stored_at: datetime | None
    attempt: ReportedAttempt | None
    attempt_at: datetime | None
    consumer: Mapping[str, Any] | None
    up_since: datetime | None
    now: datetime


def why_refused(facts: WaitFacts, asked: Asked) -> str | None:
    """Return why a job can't be retried or given up now, and what to do; ``None`` where it certainly waits."""
    attempt, at = facts.attempt, facts.attempt_at
    if facts.stored_at is None:
        return "it isn't stored: it has ended, or never was"
    if attempt is None or at is None or at < facts.stored_at:
        return (
            "no worker has stored how an attempt at it ended, and a job that waits can't be told from one that runs:"
            " wait for its next delivery, or cancel it"
        )
    number = attempt.deliveries
    if not attempt.failed:
        return f"attempt {number} has not failed, as far as is known: it may be running"
    # That it is given up can be repeated: until its next delivery nothing else can become of it.
    if attempt.asked and (attempt.asked, asked) != ("give_up", "give_up"):
        when = f" at {_text(attempt.asked_at)}" if attempt.asked_at else ""
        done = ASKED_WORDS[attempt.asked]
        return (
            f"{attempt.asked_by or 'somebody'} asked{when} that it be {done} after attempt {number}: it may be running;"
            " if not, it is delivered again by itself"
        )
    if attempt.waits_until is None or attempt.requested_at is None or attempt.ack_wait is None:
        return (
            f"the worker of attempt {number} didn't store until when the job waits: it doesn't do so in general, the"
            " server didn't confirm that within the ack wait, or it was the last attempt"
        )
    not_believed = _why_not_believed(facts, number, attempt.requested_at, attempt.ack_wait)
    return not_believed or _why_late(facts, number, attempt.waits_until)


def _why_not_believed(facts: WaitFacts, number: int, requested_at: datetime, ack_wait: float) -> str | None:
    if facts.consumer is None or datetime.fromisoformat(facts.consumer["created"]) > requested_at:
        return f"its consumer was deleted or created again since attempt {number}: the job may be running"
    config = facts.consumer["config"]
    backoff = config.get("backoff") or [config.get("ack_wait") or _DEFAULT_ACK_WAIT]
    if backoff[min(number, len(backoff)) - 1] != round(ack_wait * NANOSECONDS):
        return f"its consumer's ack wait or backoff was changed since attempt {number}: the job may be running"
    if 0 < config.get("max_deliver", -1) <= number:
        return f"attempt {number} was the last one: it is a dead letter; redrive or discard it"
    if facts.up_since is None:
        return (
            "it isn't known whether the server was restarted since, which makes it forget how long jobs wait: that"
            " takes an audit stream, and in a cluster nats-server 2.12 or later"
        )
    if facts.up_since > requested_at:
        return f"the server may have been restarted since attempt {number}, and have delivered the job again"
    return None


def _why_late(facts: WaitFacts, number: int, until: datetime) -> str | None:
    left = (until - facts.now).total_seconds()
    if left > MARGIN.total_seconds():
        return None
    if left > 0:
        return f"it is delivered again in {left:.0f} s, too soon to change that safely"
    return f"it waited until {_text(until)} after attempt {number}: the next one may be running"


def _text(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


async def retry_job(
    connection: Connection, queue: WorkQueue, sequence: int, why: str | None = None, by: str | None = None
) -> RetryReport:
    """Have the server deliver a job at once that waits for its next delivery.

    :param queue: the declaration, with ``attempts``
    :param sequence: the job's stream sequence
    :param why: a reason, for people
    :param by: the person or program that asks
    :raises JobNotWaitingError: it isn't proved that the job waits; nothing was changed
    :raises QueueDeclarationError: the queue declares no attempts
    :raises TransientError: the server didn't confirm it; the job is delivered at once, or when its wait is over
    """
    waiting = await _ask(connection, queue, sequence, "retry", why, by)
    waiting.check("retry")
    await connection.request(waiting.ack_subject, b"-NAK", time_limit=_REQUEST_SECONDS)
    return waiting.report("retry")


async def give_up_job(
    connection: Connection, queue: WorkQueue, sequence: int, why: str | None = None, by: str | None = None
) -> RetryReport:
    """Make a dead letter of a job that waits for its next delivery: its copy is stored, then it is terminated.

    What was cut off in between can be repeated, as long as the job waits.

    :param queue: the declaration, with ``attempts`` and ``dead_letters``
    :param sequence: the job's stream sequence
    :param why: a reason, for people
    :param by: the person or program that asks
    :raises JobNotWaitingError: it isn't proved that the job waits; nothing was changed
    :raises QueueDeclarationError: the queue declares no attempts, or no dead letter queue
    :raises NotFoundError: the dead letter queue doesn't store copies
    :raises TransientError: the server didn't confirm it: repeat it
    """
    if queue.dead_letters is None:
        raise QueueDeclarationError(
            queue.name, ["expected dead_letters, which keep jobs that are given up: declare it"]
        )
    letters = (await stream_info(connection, queue.dead_letters.name))["config"]
    if letters.get("retention") == "interest":
        raise NotFoundError(f"expected {queue.dead_letters.name} to keep copies, found interest retention")
    waiting = await _ask(connection, queue, sequence, "give_up", why, by)
    explanation = one_line(f"given up by {by or 'a person'}" + (f": {why}" if why else "")) or ""
    await waiting.store_copy(queue.dead_letters.name, explanation)
    waiting.check("give_up")
    await connection.request(waiting.ack_subject, f"+TERM {explanation}".encode(), time_limit=_REQUEST_SECONDS)
    if await get_message(connection, queue.name, sequence) is not None:
        raise RedriveError(f"expected job {sequence} to be gone after its termination, found it stored: repeat it")
    return waiting.report("give_up")


@dataclass(frozen=True, slots=True)
class _WaitingJob:
    connection: Connection
    created: str
    job: StoredMessage
    facts: WaitFacts
    attempt: ReportedAttempt
    until: datetime
    clock: ServerClock
    reconnects: int

    @property
    def ack_subject(self) -> str:
        return late_ack_subject(self.attempt.stream, self.attempt.consumer, self.job.sequence)

    def check(self, asked: Asked) -> None:
        """Raise an error where the wait is nearly over by now, or the connection was lost since the proof began.

        A restart of the server may be why it was lost.

        :raises JobNotWaitingError: that is so
        """
        if not self.connection.is_connected or self.connection.reconnects != self.reconnects:
            why = "the connection was lost meanwhile, and the server may have been restarted: try again"
            raise _refusal(self.job.sequence, asked, why)
        if self.until - self.clock.now() <= MARGIN:
            raise _refusal(self.job.sequence, asked, "its wait was over before the server could be asked")

    def report(self, asked: Asked) -> RetryReport:
        return RetryReport(self.job.sequence, asked, self.attempt.deliveries, self.until)

    async def store_copy(self, letters: str, explanation: str) -> None:
        attempt, job = self.attempt, self.job
        death = Death(
            stream=attempt.stream,
            created=self.created,
            sequence=job.sequence,
            consumer=attempt.consumer,
            reason=Reason.TERMINATED,
            died_at=max(self.clock.now(), job.stored_at),
            deliveries=attempt.deliveries,
            explanation=explanation,
            error_class=attempt.error_class,
            error_message=attempt.error_message,
            error_place=attempt.error_place,
            worker=attempt.worker,
            seconds=attempt.seconds,
        )
        subject = copy_subject(attempt.stream, attempt.consumer, job.sequence)
        headers = record_headers(death, subject=job.subject, time=job.time, headers=job.headers, writer=_WRITER)
        is_own = partial(is_copy_of, death, job.data)
        ack = await store_once(self.connection, subject, job.data, headers, is_own)
        if ack.stream != letters:
            raise NotFoundError(f"expected {letters} to store {subject}, found {ack.stream}: provision the queue")


async def _ask(
    connection: Connection, queue: WorkQueue, sequence: int, asked: Asked, why: str | None, by: str | None
) -> _WaitingJob:
    """Prove that a job waits, and store who asks for what."""
    if queue.attempts is None:
        raise QueueDeclarationError(queue.name, ["expected attempts, by which it is known what waits: declare them"])
    reconnects = connection.reconnects
    record = await last_message(connection, queue.attempts.name, job_attempt_filter(queue.name, sequence))
    attempt = attempt_of(record, queue.name) if record else None
    before = time.monotonic()
    stream = await stream_info(connection, queue.name)
    # Counted from before the request, so that it isn't late.
    clock = ServerClock(datetime.fromisoformat(stream["ts"]), before)
    consumer = await _consumer(connection, queue.name, attempt.consumer) if attempt else None
    up_since = await _up_since(connection, queue, consumer) if consumer else None
    job = await get_message(connection, queue.name, sequence)
    stored_at, record_at = job.stored_at if job else None, record.stored_at if record else None
    facts = WaitFacts(stored_at, attempt, record_at, consumer, up_since, clock.now())
    if refused := why_refused(facts, asked):
        raise _refusal(sequence, asked, refused)
    assert job and record and attempt and attempt.waits_until  # noqa: S101, PT018 - else it was refused
    waiting = _WaitingJob(connection, stream["created"], job, facts, attempt, attempt.waits_until, clock, reconnects)
    waiting.check(asked)
    if not attempt.asked:
        await _mark(connection, record, sequence, asked, clock.now(), why, by)
    return waiting


async def _mark(
    connection: Connection,
    record: StoredMessage,
    sequence: int,
    asked: Asked,
    now: datetime,
    why: str | None,
    by: str | None,
) -> None:
    values = json.loads(record.data) | {"asked": asked, "asked_at": now.isoformat()}
    values |= {name: one_line(text) for name, text in (("asked_by", by), ("why", why)) if text}
    body = json.dumps(values, ensure_ascii=False, allow_nan=False).encode(errors="replace")
    condition = {"Nats-Expected-Last-Subject-Sequence": str(record.sequence)}
    try:
        await store(connection, record.subject, body, condition)
    except ApiError as error:
        if error.err_code not in WRONG_LAST_SEQUENCE:
            raise
        raise _refusal(sequence, asked, "somebody else asked for something, or its worker stored more") from None


async def _consumer(connection: Connection, queue: str, name: str) -> dict[str, Any] | None:
    try:
        return await consumer_info(connection, queue, name)
    except NotFoundError:
        return None


async def _up_since(connection: Connection, queue: WorkQueue, consumer: Mapping[str, Any]) -> datetime | None:
    cluster = consumer.get("cluster") or {}
    if cluster.get("name"):
        return datetime.fromisoformat(cluster["leader_since"]) if "leader_since" in cluster else None
    return await server_up_since(connection, await stream_info(connection, queue.audit.name)) if queue.audit else None


def _refusal(sequence: int, asked: Asked, why: str) -> JobNotWaitingError:
    return JobNotWaitingError(f"expected job {sequence} to wait, so that it can be {ASKED_WORDS[asked]}, found: {why}")
