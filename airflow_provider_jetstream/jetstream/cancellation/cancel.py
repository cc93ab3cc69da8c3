"""Cancelling jobs by their ids: stored in the events stream, obeyed by workers of their own accord.

A cancellation is about the jobs of an id that were stored before it: later ones, such as a redrive or another run's job
of that id, are new. A worker looks before it starts a job, learns of it while one runs, and then stores that the job
was cancelled where it would store its completion, so that whoever waits for it learns how it ended.

The models are imported when there is something to read or write: pydantic would be most of what importing a worker
costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.headers import Headers
from airflow_provider_jetstream.jetstream.client.message_reader import get_message, last_message
from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import (
    JOB_ID,
    MSG_ID,
    cancellation_filter,
    cancellation_subject,
    completion_subject,
    end_id,
)
from airflow_provider_jetstream.jetstream.errors import NotFoundError, QueueDeclarationError
from airflow_provider_jetstream.jetstream.publishing.schedules import remove_schedules

if TYPE_CHECKING:
    from collections.abc import Iterable

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.client.publish_ack import PubAck
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


@dataclass(frozen=True, slots=True)
class Cancellation:
    """That jobs of an id are not to be done.

    :param job_id: their id
    :param at: when it was stored, by the server's clock
    :param why: a reason for people
    :param by: who wants it
    """

    job_id: str
    at: datetime
    why: str | None = None
    by: str | None = None

    def covers(self, stored_at: datetime) -> bool:
        """Tell whether a job is meant.

        :param stored_at: when a job of this id was stored, by the server's clock
        :return: whether that was before the cancellation
        """
        return stored_at <= self.at


@dataclass(frozen=True, slots=True)
class CancelReport:
    """What was done to cancel jobs.

    :param cancellation: what workers will read
    :param schedules: how many schedules of such jobs were removed
    """

    cancellation: Cancellation
    schedules: int


async def cancel(
    connection: Connection, queue: WorkQueue, job_id: str, why: str | None = None, by: str | None = None
) -> CancelReport:
    """Cancel the jobs of an id that are stored now, and schedules of such jobs.

    Nobody knows here whether there is such a job, or whether it has ended.

    :param connection: the server
    :param queue: the queue
    :param job_id: the jobs' id: their header ``Job-Id``
    :param why: a reason for people
    :param by: who wants it
    :return: what was done
    :raises QueueDeclarationError: the queue declares no events that would take it
    :raises NotFoundError: the queue or its events don't exist, or the events don't take cancellations yet
    """
    events = events_stream(queue)
    await _require_capture(connection, queue.name, events)
    # In this order: what a schedule makes until it is removed is stored before the cancellation, and so is meant.
    schedules = await remove_schedules(connection, queue.name, job_id)
    asked_at = datetime.now(UTC)
    receipt = await _store(connection, queue.name, job_id, why, by)
    message = await get_message(connection, events, receipt.sequence)
    found = read_cancellation(message) if message else None
    return CancelReport(found or Cancellation(job_id, asked_at, why, by), schedules)


async def cancel_stored(
    connection: Connection, queue: str, events: str, sequences: Iterable[int], why: str | None = None
) -> int:
    """Cancel jobs that are still stored, by their sequences.

    :param connection: the server
    :param queue: the work queue's name
    :param events: its events stream's name
    :param sequences: stream sequences of jobs; those that are gone have ended
    :param why: a reason for people
    :return: how many were cancelled; those without an id of their own can't be
    :raises NotFoundError: the queue or its events don't exist, or the events don't take cancellations yet
    """
    await _require_capture(connection, queue, events)

    async def cancel_one(sequence: int) -> bool:
        message = await get_message(connection, queue, sequence)
        job_id = message.header(JOB_ID) if message else None
        if job_id is None:
            return False
        await _store(connection, queue, job_id, why)
        return True

    return sum(await map_concurrently(cancel_one, sequences))


async def _require_capture(connection: Connection, queue: str, events: str) -> None:
    subjects = (await stream_info(connection, events))["config"].get("subjects") or []
    if not covered_by_any(subjects, cancellation_filter(queue)):
        raise NotFoundError(
            f"expected stream {events} to capture {cancellation_filter(queue)}, found {', '.join(subjects)}:"
            " provision the queue again"
        )


async def _store(
    connection: Connection, queue: str, job_id: str, why: str | None = None, by: str | None = None
) -> PubAck:
    from airflow_provider_jetstream.jetstream.advisories import CancellationRequest

    request = CancellationRequest(timestamp=datetime.now(UTC), stream=queue, job_id=job_id, why=why, by=by)
    body = request.model_dump_json(exclude_none=True).encode()
    return await store(connection, cancellation_subject(queue, job_id), body)


async def find_cancellation(
    connection: Connection, queue: WorkQueue, job_id: str, stored_at: datetime | None = None
) -> Cancellation | None:
    """Look for the cancellation of a job.

    :param connection: the server
    :param queue: the queue
    :param job_id: the job's id
    :param stored_at: when the job was stored, by the server's clock; where absent, any cancellation of the id counts
    :return: the cancellation, if there is one
    :raises QueueDeclarationError: the queue declares no events that would take it
    :raises NotFoundError: the events don't exist
    """
    message = await last_message(connection, events_stream(queue), cancellation_subject(queue.name, job_id))
    found = read_cancellation(message) if message else None
    return found if found and (stored_at is None or found.covers(stored_at)) else None


async def is_cancelled(
    connection: Connection, queue: WorkQueue, job_id: str, stored_at: datetime | None = None
) -> bool:
    """Tell whether a job is cancelled; see :func:`cancellation_of`."""
    return await find_cancellation(connection, queue, job_id, stored_at) is not None


@dataclass(frozen=True, slots=True)
class CancelledMessage:
    """What a worker publishes, with the server's acknowledgement, before it acknowledges a cancelled job.

    :param subject: where the job's completion would go
    :param body: that the job was cancelled
    :param headers: with an id that the job's completion has too: of both only the first is stored
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
    stored_at: datetime,
    deliveries: int,
    worker: str | None = None,
) -> CancelledMessage:
    """Write that a job ended because it was cancelled.

    :param cancellation: the cancellation
    :param queue: the work queue
    :param consumer: the consumer that delivered the job
    :param sequence: its stream sequence
    :param stored_at: when it was stored, by the server's clock
    :param deliveries: how often it was delivered
    :param worker: which worker found out
    :return: what is to be published
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
        Headers([(MSG_ID, end_id(queue, sequence, stored_at))]),
    )


def events_stream(queue: WorkQueue) -> str:
    """Name the stream of a queue's cancellations.

    :param queue: the queue
    :return: its events stream
    :raises QueueDeclarationError: it declares none that would take them
    """
    subject = cancellation_filter(queue.name)
    if queue.events is None or not covered_by_any(queue.events.subjects, subject):
        raise QueueDeclarationError(
            queue.name, [f"expected events that capture {subject}, so that cancellations are stored: declare them"]
        )
    return queue.events.name


def read_cancellation(message: StoredMessage) -> Cancellation | None:
    """Read a cancellation.

    :param message: a message of the events stream
    :return: the cancellation; ``None`` for anything else
    """
    from airflow_provider_jetstream.jetstream.advisories import parse_cancellation_request

    if (request := parse_cancellation_request(message.data)) is None:
        return None
    return Cancellation(request.job_id, message.stored_at, request.why, request.by)
