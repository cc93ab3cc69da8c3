"""Merges all entries of a dead letter queue about one job into one description of its death."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.advisories import Terminated
from airflow_provider_jetstream.jetstream.client.message_reader import get_message
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.client.wire_text import UNKNOWN_BYTE
from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
from airflow_provider_jetstream.jetstream.dead_letters.entry import ADVISORIES, Entry, EntryKind, last_consumer
from airflow_provider_jetstream.jetstream.dead_letters.record import Record, read_record
from airflow_provider_jetstream.jetstream.evidence import event_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot

# By detail: a worker's copy has the error, a scan's has what was known when it was made, a parked one the least.
_RECORDS = (EntryKind.COPY, EntryKind.PROVEN_COPY, EntryKind.PARKED)


@dataclass(frozen=True, slots=True)
class MergedEntry:
    """The entries about one job, merged.

    :param death: the job's death
    :param job: the job from its copy, if the dead letter queue has one
    :param origin: the task that published the job, if a copy names it
    """

    death: Death
    job: StoredMessage | None
    origin: Origin | None


async def merge_entries(
    connection: Connection,
    dead_letter_queue: str,
    snapshot: QueueSnapshot,
    sequence: int,
    entries: Sequence[Entry],
    stored: StoredMessage | None = None,
) -> MergedEntry:
    """Read the entries about a job in full, and merge them.

    :param sequence: the job's stream sequence
    :param entries: at least one
    :param stored: the job as the queue or the archive stores it, if one does: a record that contradicts this message
        isn't about the job
    """
    if len(entries) == 1 and entries[0].kind == EntryKind.DELIVERIES:
        # Nearly every letter's: there is nothing to merge it with, and nothing more to read.
        return MergedEntry(death_by_advisory(snapshot, sequence, entries[0]), None, None)
    kinds = {entry.kind for entry in entries}
    copied, stored_at = await _read_best_record(connection, dead_letter_queue, snapshot, entries, stored)
    record, job = (copied.death, copied.job) if copied else (None, None)
    # The server's advisories decide what happened; a record only makes the reason more precise.
    if EntryKind.TERMINATION in kinds:
        reason = Reason.EXPIRED if record and record.reason == Reason.EXPIRED else Reason.TERMINATED
    elif {EntryKind.DELIVERIES, EntryKind.CLAIMED} & kinds:
        reason = Reason.DEADLINE if record and record.reason == Reason.DEADLINE else Reason.MAX_DELIVERIES
    else:
        reason = Reason.EXPIRED if EntryKind.DELETION in kinds else Reason.ORPHAN
        reason = record.reason if record else reason
    explanation = record.explanation if record else None
    if EntryKind.TERMINATION in kinds and not explanation:
        explanation = await _termination_reason(connection, dead_letter_queue, snapshot.queue, entries)
    died_at = max((entry.recorded_at for entry in entries if entry.kind in ADVISORIES), default=None)
    if died_at is None and record and stored_at:
        died_at = min(record.died_at, stored_at)
    death = Death(
        stream=snapshot.queue,
        created=snapshot.created,
        sequence=sequence,
        consumer=last_consumer(entries),
        reason=reason,
        died_at=died_at or max(entry.recorded_at for entry in entries),
        first_failed_at=record.first_failed_at if record else None,
        deliveries=max(entry.deliveries for entry in entries) or None,
        explanation=explanation,
        error_class=record.error_class if record else None,
        error_message=record.error_message if record else None,
        traceback_digest=record.traceback_digest if record else None,
        error_place=record.error_place if record else None,
    )
    return MergedEntry(death, job if job and job.subject else None, copied.origin if copied else None)


def death_by_advisory(snapshot: QueueSnapshot, sequence: int, advisory: Entry) -> Death:
    """Return the death of a job of which nothing but the advisory about used-up deliveries tells.

    :param sequence: the job's stream sequence
    """
    return Death(
        stream=snapshot.queue,
        created=snapshot.created,
        sequence=sequence,
        consumer=advisory.consumer or None,
        reason=Reason.MAX_DELIVERIES,
        died_at=advisory.recorded_at,
        deliveries=advisory.deliveries or None,
    )


async def read_parked(
    connection: Connection,
    dead_letter_queue: str,
    snapshot: QueueSnapshot,
    entry: Entry,
    archived: StoredMessage | None,
) -> Record | None:
    """Read the record of a parked letter; ``None`` where the entry is gone, or is about another job.

    :param archived: the job as the archive stores it, if it does; a later job of its sequence contradicts no record
    """
    message = await get_message(connection, dead_letter_queue, entry.sequence)
    record = read_record(message, snapshot.queue) if message else None
    if record is None or not record.job.subject:
        return None
    if archived and archived.time and archived.stored_at <= entry.recorded_at and _contradicts(record.job, archived):
        return None
    return record._replace(parked=record.parked or "no reason given")


async def _read_best_record(
    connection: Connection,
    dead_letter_queue: str,
    snapshot: QueueSnapshot,
    entries: Sequence[Entry],
    stored: StoredMessage | None,
) -> tuple[Record, datetime] | tuple[None, None]:
    """Read the most detailed record, the last one where there are several of a kind, and when it was stored.

    Any worker of the consumer may have written any of them. Where the job is stored, one that contradicts it doesn't
    count; where nothing but records is left, one with a subject that its consumer takes comes before any other.
    """
    subjects = snapshot.config.get("subjects") or [">"]
    other: tuple[Record, datetime] | tuple[None, None] = (None, None)
    copies = [entry for entry in entries if entry.kind in _RECORDS]
    for entry in sorted(copies, key=lambda entry: (_RECORDS.index(entry.kind), -entry.sequence)):
        message = await get_message(connection, dead_letter_queue, entry.sequence)
        record = read_record(message, snapshot.queue) if message else None
        if message is None or record is None:
            continue
        if stored:
            if not _contradicts(record.job, stored):
                return record, message.stored_at
        elif covered_by_any(subjects, record.job.subject) and (
            snapshot.may_have_had(record.death.consumer, record.death.sequence, record.job.subject)
        ):
            return record, message.stored_at
        elif other[0] is None:
            other = record, message.stored_at
    return other


def _contradicts(job: StoredMessage, stored: StoredMessage) -> bool:
    """Return whether the job of a record isn't the stored one, by its body and the subject that the record states.

    The time that it states doesn't count: workers round it, or write that of the failure.
    """
    if job.data != stored.data:
        return True
    # A record may have a part of the subject only, and so may what the server shows.
    is_whole = job.subject and UNKNOWN_BYTE not in job.subject + stored.subject
    return bool(is_whole) and job.subject != stored.subject


async def _termination_reason(
    connection: Connection, dead_letter_queue: str, queue: str, entries: Sequence[Entry]
) -> str | None:
    last = max(entry.sequence for entry in entries if entry.kind == EntryKind.TERMINATION)
    message = await get_message(connection, dead_letter_queue, last)
    advisory = event_of(message, queue, connection.domain) if message else None
    return (advisory.reason or None) if isinstance(advisory, Terminated) else None
