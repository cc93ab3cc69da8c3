"""Finds out whether the message that the server calls a duplicate of a job is that job.

``duplicate: true`` says only that a message with the job's message id was stored. What is believed, and why:

- *The message is stored, or the archive has a copy of it*: it is the job if subject, body and headers are the job's.
- *It was stored before anything of this manifest can have been*: it is somebody else's, unless limits of the events
  stream may have dropped an earlier manifest of the same task: then the job may be the task's own, and done.
- *Nobody else can know the message id*, since this call has made it at random: it is the job.
- *The job has ended*, as a completion, a cancellation or the server's ack metric says of its sequence: it is the job.
- Otherwise it isn't known.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.advisories import AckMetric, Cancelled, Completion, parse_advisory
from airflow_provider_jetstream.jetstream.archive import ArchiveReader
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently, sleep
from airflow_provider_jetstream.jetstream.client.message_reader import get_message, read_range
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.contract import completion_filter
from airflow_provider_jetstream.jetstream.errors import ApiError, NotFoundError, PermissionDeniedError
from airflow_provider_jetstream.jetstream.publishing.job_content import is_same_job
from airflow_provider_jetstream.jetstream.queue.end_evidence import ack_metric_filter

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.client.publish_ack import PubAck
    from airflow_provider_jetstream.jetstream.publishing.report import RepeatedJob
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

log = logging.getLogger(__name__)

# The archive stores a copy a moment after the queue has stored the job.
_ARCHIVE_DELAY = 0.2


class MessageIs(Enum):
    """What a message with a job's message id is."""

    JOB = auto()
    OTHER = auto()
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True)
class PublishedBefore:
    """What a publication knows of the jobs that it may have stored before.

    :param first: the first sequence that one of them may have; 0 where that isn't known
    :param of_any_task: whether other tasks publish the same jobs, as with an idempotency key
    :param has_origin: whether a task publishes; otherwise the message ids of jobs without ids are random
    """

    first: int = 0
    of_any_task: bool = False
    has_origin: bool = False


def find_out(
    repeated: RepeatedJob, message: StoredMessage | None, publisher: PublishedBefore, ended: Collection[int]
) -> MessageIs:
    """Return what the message is that has a job's message id.

    :param message: as it is stored, or as the archive has it; ``None`` where it is gone
    :param ended: the sequences of jobs that have ended
    """
    if message is not None:
        is_job = is_same_job(repeated.job, message, of_any_task=publisher.of_any_task)
        return MessageIs.JOB if is_job else MessageIs.OTHER
    # Sequences of schedules are of another stream; one that is gone has fired, or was cancelled.
    is_queues = not repeated.job.scheduled
    if is_queues and repeated.sequence < publisher.first:
        return MessageIs.OTHER
    is_secret = not publisher.has_origin and repeated.job.key.given_id is None
    is_done = is_queues and repeated.sequence in ended
    return MessageIs.JOB if is_secret or is_done else MessageIs.UNKNOWN


async def read_messages(
    connection: Connection, queue: WorkQueue | None, created: str | None, repeated: Sequence[RepeatedJob | PubAck]
) -> list[StoredMessage | None]:
    """Read the messages that have the message ids of jobs, where stream or archive have them.

    :param created: when the queue's stream was created, where that is known
    """
    denied: set[str] = set()

    async def stored(job: RepeatedJob | PubAck) -> StoredMessage | None:
        with _unless_denied(denied):
            return await get_message(connection, job.stream, job.sequence)
        return None

    messages = await map_concurrently(stored, repeated)
    if queue is not None and queue.archive is not None and created is not None:
        with _unless_denied(denied):
            await _add_copies(connection, queue, datetime.fromisoformat(created), repeated, messages)
    for error in sorted(denied):
        log.info("What has the message ids of jobs can't be read: %s", error)
    return messages


async def _add_copies(
    connection: Connection,
    queue: WorkQueue,
    created: datetime,
    repeated: Sequence[RepeatedJob | PubAck],
    messages: list[StoredMessage | None],
) -> None:
    """Add to messages the copies that the archive has of those that are gone."""
    for pause in (0.0, _ARCHIVE_DELAY):
        if None not in messages:
            return
        await sleep(pause)
        archive = await ArchiveReader.open(connection, queue, created)
        if archive is None:
            return
        for place, job in enumerate(repeated):
            if messages[place] is None and job.stream == queue.name:
                messages[place] = await archive.find(job.sequence)


async def may_have_dropped(connection: Connection, events: str, queue: Mapping[str, Any]) -> bool:
    """Return whether limits of the events stream may have dropped the manifest of jobs whose ids the queue knows.

    :param events: the events stream
    :param queue: the queue's STREAM.INFO
    """
    try:
        info = await stream_info(connection, events)
    except (NotFoundError, PermissionDeniedError, ApiError):
        return True
    config, state = info["config"], info["state"]
    drops = config.get("discard") != "new" and any(config.get(limit, -1) > 0 for limit in ("max_msgs", "max_bytes"))
    if not drops or state["first_seq"] <= 1:
        return False
    window = timedelta(microseconds=queue["config"]["duplicate_window"] / 1_000)
    return datetime.fromisoformat(info["ts"]) - datetime.fromisoformat(state["first_ts"]) < window


async def ended_jobs(
    connection: Connection, queue: WorkQueue | None, created: str | None, sequences: set[int], events_from: int
) -> set[int]:
    """Return which of some jobs have ended well, as the events stream says.

    :param created: when the queue's stream was created: events about an earlier stream of its name don't count
    :param events_from: the first sequence of the events stream that counts
    """
    ended: set[int] = set()
    if queue is None or queue.events is None or created is None or not sequences:
        return ended
    since = datetime.fromisoformat(created)
    denied: set[str] = set()
    with _unless_denied(denied):
        for subject in (completion_filter(queue.name), ack_metric_filter(queue.name)):
            async for message in read_range(connection, queue.events.name, subject, events_from):
                event = parse_advisory(message.data) if message.stored_at >= since else None
                if isinstance(event, AckMetric) and not event.is_of_server(queue.name, connection.domain):
                    continue
                if isinstance(event, Completion | Cancelled | AckMetric) and event.stream == queue.name:
                    ended |= {event.stream_seq} & sequences
    for error in denied:
        log.info("Which jobs have ended can't be read: %s", error)
    return ended


@contextmanager
def _unless_denied(denied: set[str]) -> Iterator[None]:
    """Go on after the block where the user may not read something, or its stream is gone: then it isn't known.

    :param denied: the texts of the denials are added to it
    """
    try:
        yield
    except PermissionDeniedError as error:
        denied.add(str(error))
    except (NotFoundError, ApiError):
        pass
