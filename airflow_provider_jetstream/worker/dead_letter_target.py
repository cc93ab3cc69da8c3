"""Where the body of a terminated job can be preserved: a copy in the dead letter queue, or else the archive."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.archive import ArchiveReader
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.contract import TERMINATED, copy_filter
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, NotFoundError

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.worker.pulled_message import PulledMessage

# A message's time is computed from a float.
_SAME_TIME = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class DeadLetterTarget:
    """What a dead letter queue stores about one consumer's jobs.

    ``problem`` says why it stores no copies and what to do, ``captures_terminations`` whether it stores the server's
    advisories about terminated jobs; ``max_message_size`` is in bytes, ``None`` for no limit.
    """

    stream: str
    problem: str | None = None
    captures_terminations: bool = False
    max_message_size: int | None = None


async def inspect_target(connection: Connection, queue: WorkQueue, consumer: str) -> DeadLetterTarget:
    """Read the dead letter queue's configuration from the server; a failed request becomes the target's problem."""
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
        return DeadLetterTarget(stream, f"the dead letter queue {stream} can't be inspected: {error}")
    subjects = config.get("subjects") or []
    problem = None
    if not covered_by_any(subjects, f"{copy_filter(queue.name).removesuffix('>')}{consumer}.*"):
        problem = f'the dead letter queue {stream} captures no copies: add "{copy_filter(queue.name)}" to its subjects'
    elif config.get("retention") == "interest":
        # The server would acknowledge a copy and drop it at once if no consumer of the stream wants it.
        problem = f"the dead letter queue {stream} has interest retention: recreate it with limits retention"
    max_size = config.get("max_msg_size") or -1
    return DeadLetterTarget(
        stream,
        problem,
        captures_terminations=covered_by_any(subjects, f"{TERMINATED}.{queue.name}.{consumer}"),
        max_message_size=max_size if max_size > 0 else None,
    )


async def archive_exists(connection: Connection, queue: WorkQueue) -> bool:
    """Return whether the queue's archive is declared and exists on the server."""
    if queue.archive is None:
        return False
    try:
        await stream_info(connection, queue.archive.name)
    except JetStreamProviderError:
        return False
    return True


async def is_archived(connection: Connection, queue: WorkQueue, message: PulledMessage) -> bool:
    """Return whether the archive holds this job with its body, so that removing it from the queue loses nothing.

    :raises JetStreamProviderError: a request to the server failed
    """
    archive = await ArchiveReader.open(connection, queue, await stream_info(connection, queue.name))
    copy = await archive.find(message.sequence) if archive else None
    return copy is not None and is_same_message(copy, message) and copy.data == message.data


def is_same_message(stored: StoredMessage, message: PulledMessage) -> bool:
    """Return whether a stored message is the one that was pulled, rather than one of a recreated stream."""
    return (
        readable_text(stored.subject) == readable_text(message.subject)
        and abs(datetime.fromisoformat(stored.time) - message.stored_at) < _SAME_TIME
    )
