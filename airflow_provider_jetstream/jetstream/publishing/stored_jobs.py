"""Finds which jobs of a task are stored already, for a try after one that was cut off."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.advisories import Cancelled, Completion, parse_advisory
from airflow_provider_jetstream.jetstream.archive import ArchiveReader, job_sequence
from airflow_provider_jetstream.jetstream.client.message_reader import read_range
from airflow_provider_jetstream.jetstream.contract import MSG_ID, archive_filter, completion_filter
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from airflow_provider_jetstream.jetstream.publishing.publish_record import ID_LENGTH

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


@dataclass(frozen=True, slots=True)
class StoredJobs:
    """The jobs of a task that are known to be stored.

    :param runs: index, sequence and count of each run of jobs, in the order of the indexes
    :param message_ids: stream sequences by ``Nats-Msg-Id``
    :param job_ids: stream sequences by the ids of jobs that have ended
    :param origin: the task, where an earlier version may have published its jobs, under longer message ids
    :param recorded: stream sequences by the beginnings of message ids, of a task with an idempotency key
    """

    runs: tuple[tuple[int, int, int], ...] = ()
    message_ids: dict[str, int] = field(default_factory=dict)
    job_ids: dict[str, int] = field(default_factory=dict)
    origin: Origin | None = None
    recorded: dict[str, int] = field(default_factory=dict)

    def sequence_of(self, index: int, job: OutgoingJob) -> int | None:
        """Return the stream sequence of a job; ``None`` where it isn't known to be stored."""
        if sequence := self.recorded.get(job.message_id[:ID_LENGTH]):
            return sequence
        run = bisect_right(self.runs, index, key=lambda run: run[0]) - 1
        if run >= 0:
            first, start, count = self.runs[run]
            if index < first + count:
                return start + index - first
        message_ids = [job.message_id, *([self.origin.long_message_id(job.key)] if self.origin else [])]
        for message_id in message_ids:
            if sequence := self.message_ids.get(message_id):
                return sequence
            # An id that the user set may be another publisher's too.
            if job.job_id == job.message_id and (sequence := self.job_ids.get(message_id)):
                return sequence
        return None


async def find_stored_jobs(
    connection: Connection,
    queue: WorkQueue,
    *,
    created: datetime,
    queue_from: int,
    events_from: int,
    origin: Origin | None = None,
) -> StoredJobs:
    """Search the archive, the queue and the events stream for jobs, those of other publishers included.

    :param created: when the queue's stream was created; the archive may hold copies from an earlier one of its name
    :param queue_from: the first sequence of the queue that counts
    :param events_from: the first sequence of the events stream that counts
    :param origin: the task, where an earlier version may have published its jobs
    """
    message_ids: dict[str, int] = {}
    job_ids: dict[str, int] = {}
    if queue.archive and (archive := await ArchiveReader.open(connection, queue, created)):
        start = await archive.first_copy_from(queue_from)
        async for copy in _read(connection, archive.stream, archive_filter(queue.name), start):
            sequence, message_id = job_sequence(copy), copy.header(MSG_ID)
            if message_id and sequence >= queue_from:
                message_ids[message_id] = sequence
    async for job in _read(connection, queue.name, ">", queue_from):
        if message_id := job.header(MSG_ID):
            message_ids[message_id] = job.sequence
    if queue.events:
        async for message in _read(connection, queue.events.name, completion_filter(queue.name), events_from):
            event = parse_advisory(message.data)
            if isinstance(event, Completion | Cancelled) and event.job_id and event.stream_seq >= queue_from:
                job_ids[event.job_id] = event.stream_seq
    return StoredJobs(message_ids=message_ids, job_ids=job_ids, origin=origin)


async def _read(connection: Connection, stream: str, subject: str, start: int) -> AsyncGenerator[StoredMessage, None]:
    try:
        async for message in read_range(connection, stream, subject, start):
            yield message
    except NotFoundError:
        # A stream that doesn't exist holds none of the task's jobs.
        return
