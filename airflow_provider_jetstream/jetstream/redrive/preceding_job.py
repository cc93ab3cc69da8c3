"""What came before a letter of a key: the job of the letter redriven last, and the place of a copy in the order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.client.message_reader import get_message
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.dead_letters.letter import copied_from
from airflow_provider_jetstream.jetstream.errors import NotFoundError

if TYPE_CHECKING:
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.audit.records import LetterRecord
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


@dataclass(frozen=True, slots=True)
class PrecedingJob:
    """The job of the letter of a key that was redriven last.

    :param stream: its stream
    :param sequence: its stream sequence
    :param recorded_at: when the audit recorded it
    :param is_stored: whether it is still stored
    """

    stream: str
    sequence: int
    recorded_at: datetime
    is_stored: bool


async def preceding_job(
    connection: Connection, storing: WorkQueue, audit: AuditLog, sequence: int
) -> PrecedingJob | None:
    """Return the job that a letter became; ``None`` where nothing is to be awaited: it was parked, or not redriven.

    A job that died again, and was redriven again, counts as the job that it became then.

    :param storing: the queue that gets new jobs
    :param audit: of the letters' queue
    :param sequence: the letter's stream sequence
    """
    stream, record = audit.queue, await audit.last_record(sequence)
    found: PrecedingJob | None = None
    while record and record.new_sequence and record.action in ("redriven", "requeued"):
        stream, sequence = record.new_stream or stream, record.new_sequence
        found = PrecedingJob(stream, sequence, record.at, await _is_stored(connection, stream, sequence))
        if record.action == "requeued":
            return found
        record = await _last_record(connection, storing, audit, stream, sequence)
    return None if record and record.action == "parked" else found


async def _last_record(
    connection: Connection, storing: WorkQueue, audit: AuditLog, stream: str, sequence: int
) -> LetterRecord | None:
    if stream == audit.queue:
        return await audit.last_record(sequence)
    if stream != storing.name:
        return None
    other = await AuditLog.open(connection, storing, (await stream_info(connection, stream))["created"])
    return await other.last_record(sequence) if other else None


async def _is_stored(connection: Connection, stream: str, sequence: int) -> bool:
    try:
        return await get_message(connection, stream, sequence) is not None
    except NotFoundError:
        return False


async def place_of(audit: AuditLog, letter: DeadLetter) -> int:
    """Return the sequence of the first job of which a letter's job is a copy, or a copy of a copy."""
    place, before = letter.sequence, copied_from(letter)
    while before is not None and before < place:
        record = await audit.last_record(before)
        if record and (record.new_stream or record.new_sequence != place):
            return place
        place, before = before, record.copy_of if record else None
    return place
