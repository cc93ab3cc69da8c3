"""Where the body of a job that is given up would be safe: a copy in the dead letter queue, or else the archive."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.archive import ArchiveReader
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import TERMINATED, copy_filter
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, NotFoundError

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

# The client computes a message's time from a float.
_SAME_TIME = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class DeadLetterTarget:
    """What a queue's dead letter queue takes from one consumer.

    :param stream: its stream
    :param problem: why it keeps no copies, and what to do about it; ``None`` where it does
    :param hears_terminations: whether it stores what the server tells of terminated jobs
    :param largest: bytes of the largest message it takes, where it has a limit
    """

    stream: str
    problem: str | None = None
    captures_terminations: bool = False
    max_message_size: int | None = None


async def inspect_target(connection: Connection, queue: WorkQueue, consumer: str) -> DeadLetterTarget:
    """Look at the dead letter queue as it is on the server.

    :param connection: the server
    :param queue: the work queue
    :param consumer: one of its consumers
    :return: what it takes; a server that doesn't tell is a problem like any other
    """
    if queue.dead_letters is None:
        return DeadLetterTarget(
            "", f"{queue.name} declares no dead letter queue: declare dead_letters and provision it"
        )
    stream = queue.dead_letters.name
    try:
        config = (await stream_info(connection, stream))["config"]
    except NotFoundError:
        return DeadLetterTarget(stream, f"the dead letter queue {stream} doesn't exist: provision the queue")
    except JetStreamProviderError as error:
        return DeadLetterTarget(stream, f"the dead letter queue {stream} can't be looked at: {error}")
    subjects = config.get("subjects") or []
    problem = None
    if not covered_by_any(subjects, f"{copy_filter(queue.name).removesuffix('>')}{consumer}.*"):
        problem = f'the dead letter queue {stream} captures no copies: add "{copy_filter(queue.name)}" to its subjects'
    elif config.get("retention") == "interest":
        # It would acknowledge a copy and drop it at once if no consumer of its wants it.
        problem = f"the dead letter queue {stream} has interest retention: recreate it with limits retention"
    largest = config.get("max_msg_size") or -1
    return DeadLetterTarget(
        stream,
        problem,
        captures_terminations=covered_by_any(subjects, f"{TERMINATED}.{queue.name}.{consumer}"),
        max_message_size=largest if largest > 0 else None,
    )


async def archive_exists(connection: Connection, queue: WorkQueue) -> bool:
    """Tell whether the queue's archive is declared and there.

    :param connection: the server
    :param queue: the work queue
    :return: whether copies made by the server may be found there
    """
    if queue.archive is None:
        return False
    try:
        await stream_info(connection, queue.archive.name)
    except JetStreamProviderError:
        return False
    return True


async def is_archived(connection: Connection, queue: WorkQueue, message: Msg) -> bool:
    """Tell whether the archive holds just this job, body and all.

    :param connection: the server
    :param queue: the work queue
    :param message: the job as it was pulled
    :return: whether the job can be taken out of the queue without losing its body
    :raises JetStreamProviderError: the server didn't tell
    """
    created = datetime.fromisoformat((await stream_info(connection, queue.name))["created"])
    archive = await ArchiveReader.open(connection, queue, created)
    found = await archive.find(message.metadata.sequence.stream) if archive else None
    return found is not None and is_same_message(found, message) and found.data == message.data


def is_same_message(stored: StoredMessage, message: Msg) -> bool:
    """Tell whether a stored message is the one that was pulled, rather than one of a recreated stream.

    :param stored: the stored message
    :param message: the job as it was pulled
    :return: whether they are the same
    """
    return (
        stored.subject == message.subject
        and abs(datetime.fromisoformat(stored.time) - message.metadata.timestamp) < _SAME_TIME
    )
