"""Searches for jobs that a try of a task has stored and not recorded, since it was cut off."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.advisories import Cancelled, Completion
from airflow_provider_jetstream.jetstream.archive import ArchiveReader, job_sequence, republished_message
from airflow_provider_jetstream.jetstream.client.message_reader import msg_get, read_range
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.contract import archive_filter, completion_filter
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from airflow_provider_jetstream.jetstream.evidence import event_of
from airflow_provider_jetstream.jetstream.publishing.report import SCHEDULED

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.publishing.stored_jobs import StoredJobs
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


async def find_stored_jobs(
    connection: Connection,
    queue: WorkQueue,
    stored: StoredJobs,
    *,
    created: datetime,
    queue_from: int,
    events_from: int,
    task_key: str | None,
) -> None:
    """Search the queue, its companions included, for jobs, and add all of them to those that are known.

    :param stored: gets jobs of other publishers, too: a job counts only where the message is the job
    :param created: when the queue's stream was created; the archive may hold copies from an earlier one of its name
    :param queue_from: the first sequence of the queue that counts
    :param events_from: the first sequence of the events stream that counts
    :param task_key: the key in the task's jobs; ``None`` where other jobs have it too
    """
    # In the order in which a job moves, so that none is missed.
    if queue.schedules:
        async for schedule in _read(connection, queue.schedules.name, ">", 1):
            stored.add_message(schedule, schedule.sequence | SCHEDULED, task_key=task_key)
    async for sequence, message in _copies(connection, queue, created, queue_from):
        stored.add_message(message, sequence, task_key=task_key)
    if queue.events:
        async for message in _read(connection, queue.events.name, completion_filter(queue.name), events_from):
            event = event_of(message, queue.name)
            if isinstance(event, Completion | Cancelled) and event.job_id and event.stream_seq >= queue_from:
                # Only a message id counts: an id that the user set may be another publisher's too.
                stored.add_ended(event.job_id, event.stream_seq)


async def jobs_since(connection: Connection, queue: WorkQueue, moment: datetime) -> AsyncGenerator[StoredMessage, None]:
    """Yield the jobs that a queue has stored since a moment, as the archive has them and as it stores them.

    Needs nats-server 2.11.

    :param moment: by the server's clock
    """
    created = datetime.fromisoformat((await stream_info(connection, queue.name))["created"])
    if queue.archive:
        subject = archive_filter(queue.name)
        async for copy in _read_since(connection, queue.archive.name, subject, moment):
            if job_sequence(copy) and (job := republished_message(copy)).stored_at >= created:
                yield job
    async for job in _read_since(connection, queue.name, ">", moment):
        yield job


async def first_since(connection: Connection, stream: str, subject: str, moment: datetime) -> int | None:
    """Return the sequence of the first message that was stored since a moment; ``None`` without any."""
    since = moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    try:
        first = await msg_get(connection, stream, {"next_by_subj": subject, "start_time": since})
    except NotFoundError:
        return None
    return first.sequence if first else None


async def _read_since(
    connection: Connection, stream: str, subject: str, moment: datetime
) -> AsyncGenerator[StoredMessage, None]:
    if start := await first_since(connection, stream, subject, moment):
        async for message in _read(connection, stream, subject, start):
            yield message


async def _copies(
    connection: Connection, queue: WorkQueue, created: datetime, queue_from: int
) -> AsyncGenerator[tuple[int, StoredMessage], None]:
    if queue.archive and (archive := await ArchiveReader.open(connection, queue, created)):
        start = await archive.first_copy_from(queue_from)
        async for copy in _read(connection, archive.stream, archive_filter(queue.name), start):
            if (sequence := job_sequence(copy)) >= queue_from:
                yield sequence, republished_message(copy)
    async for job in _read(connection, queue.name, ">", queue_from):
        yield job.sequence, job


async def _read(connection: Connection, stream: str, subject: str, start: int) -> AsyncGenerator[StoredMessage, None]:
    try:
        async for message in read_range(connection, stream, subject, start):
            yield message
    except NotFoundError:
        # A stream that doesn't exist holds none of the task's jobs.
        return
