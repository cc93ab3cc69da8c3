"""Cancels jobs: a cancellation is stored in the events stream, and workers act on it.

A cancellation by id covers the jobs of an id that were stored before it, whoever published them; a later one, such as a
redrive or another run's job of that id, is new. A cancellation by sequence covers the one job that was stored under it
before, since others may use its id: a task that ends cancels what it has published itself. A worker checks before it
starts a job, is notified while a job runs, and then stores the end of the cancelled job where it would store its
completion, so that waiters learn of it.

The models are imported when there is something to read or write: importing pydantic would take most of the time in
which a worker starts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.headers import Headers
from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.streams import get_message, last_message
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import (
    MSG_ID,
    cancellation_filter,
    cancellation_subject,
    completion_subject,
    end_id,
    job_cancellation_subject,
)
from airflow_provider_jetstream.jetstream.errors import JobError, NotFoundError
from airflow_provider_jetstream.jetstream.limits import EVENT_ID
from airflow_provider_jetstream.jetstream.line_text import shown_value
from airflow_provider_jetstream.jetstream.publishing.job import job_id_of
from airflow_provider_jetstream.jetstream.publishing.schedules import remove_schedules
from airflow_provider_jetstream.jetstream.queue.work_queue import events_stream
from airflow_provider_jetstream.jetstream.task_values import TaskReport

if TYPE_CHECKING:
    from collections.abc import Iterable

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.client.publish_ack import PubAck
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

# Jobs whose ids are read before any of them is cancelled.
_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class Cancellation:
    """A stored cancellation of the jobs with an id, or of one of them.

    :param at: when it was stored, by the server's clock
    :param why: a reason for people
    :param by: the person or system that cancels
    :param sequence: the stream sequence of the only job that it is for
    """

    job_id: str
    at: datetime
    why: str | None = None
    by: str | None = None
    sequence: int | None = None

    @property
    def key(self) -> str | int:
        """The identity of a cancellation: of two with one key, the later one counts."""
        return self.job_id if self.sequence is None else self.sequence

    def covers(self, stored_at: datetime) -> bool:
        """Return whether a job of this key that was stored at a time of the server's clock is cancelled."""
        return stored_at <= self.at


@dataclass(frozen=True, slots=True)
class CancelReport(TaskReport):
    """The result of cancelling jobs.

    :param cancellation: what workers read
    :param schedules: how many schedules of such jobs, and jobs that were due, were removed
    """

    cancellation: Cancellation
    schedules: int


async def cancel(
    connection: Connection, queue: WorkQueue, job_id: str, why: str | None = None, by: str | None = None
) -> CancelReport:
    """Cancel the jobs of an id that are stored now, and schedules of such jobs.

    Whether there is such a job, and whether it has ended, isn't checked.

    :param job_id: the jobs' id: their header ``Job-Id``, else the ``id`` of their bodies, else their ``Nats-Msg-Id``
    :param why: a reason for people
    :param by: the person or system that cancels
    :raises QueueDeclarationError: the queue declares no events that capture cancellations
    :raises NotFoundError: the queue or its events don't exist, or the events don't capture cancellations yet
    """
    (report,) = await cancel_jobs(connection, queue, [job_id], why, by)
    return report


async def cancel_jobs(
    connection: Connection, queue: WorkQueue, job_ids: Iterable[str], why: str | None = None, by: str | None = None
) -> list[CancelReport]:
    """Do what :func:`cancel` does for several ids.

    :param job_ids: ids of jobs
    :return: a report for each different id, in their order
    :raises QueueDeclarationError: the queue declares no events that capture cancellations
    :raises NotFoundError: the queue or its events don't exist, or the events don't capture cancellations yet
    """
    events = events_stream(queue)
    await _require_capture(connection, queue.name, events)
    unique = dict.fromkeys(job_ids)
    removed: Counter[str] = Counter()
    if queue.schedules:
        # In this order: the cancellation covers a job that was moved before its removal; a mover that has one in its
        # hands looks for the cancellation.
        removed = await remove_schedules(connection, queue.name, queue.schedules.name, unique)

    async def cancel_one(job_id: str) -> CancelReport:
        requested_at = datetime.now(UTC)
        ack = await _store(connection, queue.name, job_id, None, why, by)
        message = await get_message(connection, events, ack.sequence)
        cancellation = read_cancellation(message) if message else None
        return CancelReport(cancellation or Cancellation(job_id, requested_at, why, by), removed[job_id])

    return await map_concurrently(cancel_one, unique)


async def cancel_stored(
    connection: Connection,
    queue: str,
    events: str,
    sequences: Iterable[int],
    why: str | None = None,
    by: str | None = None,
    *,
    created: str | None = None,
) -> int:
    """Cancel the jobs that are still stored among these, and no other ones of their ids; return their number.

    :param queue: the work queue's name
    :param events: its events stream's name
    :param sequences: stream sequences of jobs
    :param why: a reason for people
    :param by: the person or system that cancels
    :param created: when the stream was created that gave the jobs their sequences: a later stream of its name has other
        jobs under them; none of these is cancelled
    :raises NotFoundError: the queue or its events don't exist, or the events don't capture cancellations yet
    """
    await _require_capture(connection, queue, events)

    async def stored_id(sequence: int) -> tuple[int, str] | None:
        message = await get_message(connection, queue, sequence)
        job_id = job_id_of(message.headers, message.data, sequence) if message else ""
        return (sequence, job_id if len(job_id) <= EVENT_ID else str(sequence)) if message else None

    async def cancel_one(job: tuple[int, str]) -> None:
        sequence, job_id = job
        await _store(connection, queue, job_id, sequence, why, by)

    cancelled, remaining = 0, iter(sequences)
    while batch := list(islice(remaining, _AT_ONCE)):
        jobs = [job for job in await map_concurrently(stored_id, batch) if job is not None]
        # Read after the jobs: they are of this stream.
        if created and jobs and (await stream_info(connection, queue))["created"] != created:
            break
        await map_concurrently(cancel_one, jobs)
        cancelled += len(jobs)
    return cancelled


async def _require_capture(connection: Connection, queue: str, events: str) -> None:
    subjects = (await stream_info(connection, events))["config"].get("subjects") or []
    if not covered_by_any(subjects, cancellation_filter(queue)):
        raise NotFoundError(
            f"expected stream {events} to capture {cancellation_filter(queue)}, found {', '.join(subjects)}:"
            " provision the queue again"
        )


async def _store(
    connection: Connection, queue: str, job_id: str, sequence: int | None, why: str | None, by: str | None
) -> PubAck:
    from airflow_provider_jetstream.jetstream.advisories import CancellationRequest

    if len(job_id) > EVENT_ID or job_id != job_id.encode(errors="replace").decode():
        raise JobError(f"expected the id of a job, UTF-8 of at most {EVENT_ID} characters, found {shown_value(job_id)}")
    now = datetime.now(UTC)
    request = CancellationRequest(timestamp=now, stream=queue, job_id=job_id, stream_seq=sequence, why=why, by=by)
    body = request.model_dump_json(exclude_none=True).encode()
    subject = cancellation_subject(queue, job_id)
    if sequence is not None:
        subject = job_cancellation_subject(queue, sequence)
    return await store(connection, subject, body)


async def find_cancellation(
    connection: Connection, queue: WorkQueue, job_id: str, stored_at: datetime | None = None
) -> Cancellation | None:
    """Read the cancellation of an id, if there is one.

    :param stored_at: when a job of it was stored, by the server's clock; where absent, any cancellation of it counts
    :raises QueueDeclarationError: the queue declares no events that capture cancellations
    :raises NotFoundError: the events don't exist
    """
    message = await last_message(connection, events_stream(queue), cancellation_subject(queue.name, job_id))
    cancellation = read_cancellation(message) if message else None
    return cancellation if cancellation and (stored_at is None or cancellation.covers(stored_at)) else None


@dataclass(frozen=True, slots=True)
class CancelledMessage:
    """What a worker stores before it acknowledges a cancelled job.

    :param subject: the subject of the job's completion
    :param headers: with the message id of the job's completion: of both only the first is stored
    """

    subject: str
    body: bytes
    headers: Headers


def cancelled_message(
    cancellation: Cancellation,
    *,
    queue: str,
    consumer: str,
    sequence: int,
    stored_nanoseconds: int,
    deliveries: int,
    worker: str | None = None,
) -> CancelledMessage:
    """Build the event of a job that ended because it was cancelled.

    :param consumer: the consumer that delivered the job
    :param sequence: the job's stream sequence
    :param stored_nanoseconds: when the job was stored, since 1970, by the server's clock
    :param worker: the worker that stores the event
    """
    from airflow_provider_jetstream.jetstream.advisories import Cancelled

    event = Cancelled(
        timestamp=datetime.now(UTC),
        stream=queue,
        consumer=consumer,
        stream_seq=sequence,
        deliveries=deliveries,
        job_id=cancellation.job_id,
        worker=worker,
        why=cancellation.why,
        by=cancellation.by,
    )
    return CancelledMessage(
        completion_subject(queue, consumer, sequence),
        event.model_dump_json(exclude_none=True).encode(),
        Headers([(MSG_ID, end_id(queue, sequence, stored_nanoseconds))]),
    )


async def repeat_cancellation(connection: Connection, queue: WorkQueue, cancellation: Cancellation) -> None:
    """Store a cancellation once more, so that it covers a job that was on its way to the queue."""
    await _store(connection, queue.name, cancellation.job_id, None, cancellation.why, cancellation.by)


def read_cancellation(message: StoredMessage) -> Cancellation | None:
    """Parse a message of the events stream; ``None`` where it is no cancellation."""
    from airflow_provider_jetstream.jetstream.advisories import parse_cancellation_request
    from airflow_provider_jetstream.jetstream.evidence import proves_nothing

    if proves_nothing(message) or (request := parse_cancellation_request(message.data)) is None:
        return None
    return Cancellation(request.job_id, message.stored_at, request.why, request.by, request.stream_seq)
