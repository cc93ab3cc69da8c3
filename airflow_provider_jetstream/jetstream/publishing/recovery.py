"""Finding the jobs that a task stored before it was cut off, whatever became of them since."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.advisories import Cancelled, Completion, parse_advisory
from airflow_provider_jetstream.jetstream.archive import job_sequence
from airflow_provider_jetstream.jetstream.client.range_reader import read_range
from airflow_provider_jetstream.jetstream.contract import JOB_ID, MSG_ID, archive_filter, completion_filter
from airflow_provider_jetstream.jetstream.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


@dataclass(frozen=True, slots=True)
class PublishedBefore:
    """Which jobs of a task are stored, as far as it is known.

    :param runs: index, sequence and count of each run of jobs, in the order of the indexes
    :param message_ids: stream sequences by ``Nats-Msg-Id``
    :param job_ids: stream sequences by the ``Job-Id`` of jobs that have ended
    """

    runs: tuple[tuple[int, int, int], ...] = ()
    message_ids: dict[str, int] = field(default_factory=dict)
    job_ids: dict[str, int] = field(default_factory=dict)

    def known(self, index: int, job: OutgoingJob) -> int | None:
        """Tell where a job is stored.

        :param index: its place among the task's jobs
        :param job: the job
        :return: its stream sequence; ``None`` where it isn't known to be stored
        """
        place = bisect_right(self.runs, index, key=lambda run: run[0]) - 1
        if place >= 0:
            first, start, count = self.runs[place]
            if index < first + count:
                return start + index - first
        if sequence := self.message_ids.get(job.message_id):
            return sequence
        # An id that the user gave may be another publisher's too.
        return self.job_ids.get(job.message_id) if job.headers[JOB_ID] == job.message_id else None


async def find_published(
    connection: Connection, queue: WorkQueue, *, queue_from: int, archive_from: int, events_from: int
) -> PublishedBefore:
    """Look for jobs where they are stored, where copies of them are, and among the ends.

    :param connection: the server
    :param queue: the work queue
    :param queue_from: the first sequence to consider in it
    :param archive_from: the first one in its archive
    :param events_from: the first one among its events
    :return: what was found; it may be about other publishers' jobs too
    """
    message_ids: dict[str, int] = {}
    job_ids: dict[str, int] = {}
    if queue.archive:
        async for copy in _read(connection, queue.archive.name, archive_filter(queue.name), archive_from):
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
    return PublishedBefore(message_ids=message_ids, job_ids=job_ids)


async def _read(connection: Connection, stream: str, subject: str, start: int) -> AsyncGenerator[StoredMessage, None]:
    try:
        async for message in read_range(connection, stream, subject, start):
            yield message
    except NotFoundError:
        # Then it holds nothing of ours.
        return
