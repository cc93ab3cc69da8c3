"""Hearing in full what a dead letter queue's entries say about one job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.advisories import Terminated, parse_advisory
from airflow_provider_jetstream.jetstream.client.message_reader import get_message
from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry, EntryKind, last_consumer
from airflow_provider_jetstream.jetstream.dead_letters.record import read_record

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot

# A worker's copy tells more than a scan's, and that more than what is left when a letter was parked.
_TELLING = (EntryKind.COPY, EntryKind.PROVEN_COPY, EntryKind.PARKED)
ADVISORIES: Final = (EntryKind.DELIVERIES, EntryKind.TERMINATION, EntryKind.DELETION)


@dataclass(frozen=True, slots=True)
class MergedEntry:
    """What is said about one job, put together.

    :param death: its death
    :param job: the job as it was kept, if it was
    """

    death: Death
    job: StoredMessage | None


async def merge_entries(
    connection: Connection, letters: str, snapshot: QueueSnapshot, sequence: int, mentions: Sequence[Entry]
) -> MergedEntry:
    """Put together what is said about a job.

    :param connection: the server
    :param letters: the dead letter queue
    :param around: how the work queue is
    :param sequence: the job's stream sequence
    :param mentions: what is said about it, at least one
    :return: its death, and its body where that was kept
    """
    kinds = {each.kind for each in mentions}
    told, job, told_at = await _record(connection, letters, snapshot, mentions)
    if EntryKind.TERMINATION in kinds:
        reason = Reason.EXPIRED if told and told.reason == Reason.EXPIRED else Reason.TERMINATED
    elif EntryKind.DELIVERIES in kinds:
        reason = Reason.DEADLINE if told and told.reason == Reason.DEADLINE else Reason.MAX_DELIVERIES
    else:
        reason = told.reason if told else Reason.EXPIRED
    explanation = told.explanation if told else None
    if EntryKind.TERMINATION in kinds and not explanation:
        explanation = await _explanation(connection, letters, mentions)
    died_at = max((each.recorded_at for each in mentions if each.kind in ADVISORIES), default=None)
    if died_at is None and told and told_at:
        died_at = min(told.died_at, told_at)
    death = Death(
        stream=snapshot.queue,
        created=snapshot.created,
        sequence=sequence,
        consumer=last_consumer(mentions),
        reason=reason,
        died_at=died_at or max(each.recorded_at for each in mentions),
        first_failed_at=told.first_failed_at if told else None,
        deliveries=max(each.deliveries for each in mentions) or None,
        explanation=explanation,
        error_class=told.error_class if told else None,
        error_message=told.error_message if told else None,
        traceback_digest=told.traceback_digest if told else None,
        error_place=told.error_place if told else None,
    )
    return MergedEntry(death, job if job and job.subject else None)


async def read_parked(
    connection: Connection, letters: str, snapshot: QueueSnapshot, mention: Entry
) -> tuple[Death, StoredMessage, str] | None:
    """Read a parked letter.

    :param connection: the server
    :param letters: the dead letter queue
    :param around: how the work queue is
    :param mention: the entry
    :return: its death, the job, and why it was parked; ``None`` where it is gone
    """
    message = await get_message(connection, letters, mention.sequence)
    record = read_record(message, snapshot.queue) if message else None
    if record is None or not record[1].subject:
        return None
    return record[0], record[1], record[2] or "no reason given"


async def _record(
    connection: Connection, letters: str, around: QueueSnapshot, mentions: Sequence[Entry]
) -> tuple[Death, StoredMessage, datetime] | tuple[None, None, None]:
    """Read the record that tells most, the last one where there are several."""
    copies = [each for each in mentions if each.kind in _TELLING]
    for mention in sorted(copies, key=lambda each: (_TELLING.index(each.kind), -each.sequence)):
        message = await get_message(connection, letters, mention.sequence)
        if message and (record := read_record(message, around.queue)):
            return record[0], record[1], message.stored_at
    return None, None, None


async def _explanation(connection: Connection, letters: str, mentions: Sequence[Entry]) -> str | None:
    entry = max(each.sequence for each in mentions if each.kind == EntryKind.TERMINATION)
    message = await get_message(connection, letters, entry)
    advisory = parse_advisory(message.data) if message else None
    return (advisory.reason or None) if isinstance(advisory, Terminated) else None
