"""What a decision about jobs is made of: the facts about each job and its queue, and what its entries say together.

Values only; :mod:`~airflow_provider_jetstream.jetstream.dead_letters.facts` reads them, and
:mod:`~airflow_provider_jetstream.jetstream.dead_letters.classify` decides by them. A fact that wasn't read is an
:class:`Unread`; a decision that needs it ends, and :func:`decide` returns which it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from airflow_provider_jetstream.jetstream.advisories import Terminated
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.client.wire_text import UNKNOWN_BYTE
from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
from airflow_provider_jetstream.jetstream.dead_letters.entry import (
    ADVISORIES,
    Entry,
    EntryKind,
    last_consumer,
)
from airflow_provider_jetstream.jetstream.dead_letters.record import Record, read_record
from airflow_provider_jetstream.jetstream.evidence import event_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.audit.records import LetterRecord
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot


_T = TypeVar("_T")


# By detail: a worker's copy has the error, a scan's has what was known when it was made, a parked one the least.
RECORDS = (EntryKind.COPY, EntryKind.PROVEN_COPY, EntryKind.PARKED)


_OF_RECORD = (*("error_class", "error_message", "traceback_digest", "error_place", "traceback", "worker", "seconds"),)


class Unread(Enum):
    """A fact that wasn't read, and decides."""

    ENDS = "the ends that workers of a consumer stored"
    FOREIGN_END = "the last end that a worker of any consumer stored"
    NEAR_ACKNOWLEDGEMENTS = "the acknowledgements around a termination"
    ACKNOWLEDGEMENT = "the last acknowledgement"
    ARCHIVED = "the archive's copy"
    RECORDS = "the records among the entries"
    TERMINATION = "the advisory about a termination"
    NEW_JOB = "the new job that the audit names"
    REMOVED_ENTRIES = "whether entries are still stored"
    UP_SINCE = "since when the server has been up"


@dataclass(slots=True)
class JobFacts:
    """What was read about one job: first the job itself, then all else.

    :param sequence: its stream sequence
    :param entries: all entries about jobs of this sequence
    :param stored: the job as the queue stores it
    :param ends: by consumer the last completion that its workers stored; ``None`` where no end of any job is stored
    :param record: the audit's last record about the sequence
    :param reported_at: when a handler of the dead letter queue last reported that it is handled
    :param archived: the job as the archive stores it
    :param is_given_again: whether the archive has a later job of the sequence
    :param records: by their sequences the records among the entries, as far as they are stored
    :param termination: the last termination's advisory
    :param foreign_end: when a worker of any consumer last stored an end
    :param near_acknowledgements: when the server stored ack metrics around the termination
    :param acknowledged_at: when the server stored the last ack metric
    :param new_job: what the queue stores where the audit says that the new job is, or the archive's copy of what was
        there; the queue's last sequence; and whether there is an archive, which has copies of all jobs
    :param has_removed_entries: whether an entry isn't stored any more
    """

    sequence: int
    entries: tuple[Entry, ...]
    stored: StoredMessage | None = None
    ends: Mapping[str, StoredMessage | None] | None = None
    record: LetterRecord | None = None
    reported_at: datetime | None = None
    archived: StoredMessage | Unread | None = Unread.ARCHIVED
    is_given_again: bool = False
    records: Mapping[int, StoredMessage | None] | Unread = Unread.RECORDS
    termination: StoredMessage | Unread | None = Unread.TERMINATION
    foreign_end: datetime | Unread | None = Unread.FOREIGN_END
    near_acknowledgements: Sequence[datetime] | Unread = Unread.NEAR_ACKNOWLEDGEMENTS
    acknowledged_at: datetime | Unread | None = Unread.ACKNOWLEDGEMENT
    new_job: tuple[StoredMessage | None, int, bool] | Unread = Unread.NEW_JOB
    has_removed_entries: bool | Unread = Unread.REMOVED_ENTRIES


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """What was read about the queue of the jobs, before the jobs.

    :param snapshot: stream and consumers
    :param domain: the JetStream domain of its server
    :param inconsistent_consumers: consumers that have fewer dead letters than entries state: the server forgot a death
        in a crash
    :param with_unaccounted: whether an unaccounted job with a copy counts as a dead letter
    :param has_handlers: whether consumers of the dead letter queue remove entries by acknowledging them
    :param disputed: jobs without an entry that another consumer's worker may have
    :param passed: jobs that their idle consumer has neither delivered nor is about to deliver
    :param unaccounted: jobs that are gone without evidence of their end and whose sequences a request names
    :param named: jobs whose sequences a request names: what is uncertain of them is the request's to know
    :param up_since: since when the server has been up; ``None`` where that isn't known
    """

    snapshot: QueueSnapshot
    domain: str = ""
    inconsistent_consumers: Collection[str] = ()
    with_unaccounted: bool = False
    has_handlers: bool = False
    disputed: Collection[int] = ()
    passed: Collection[int] = ()
    unaccounted: Collection[int] = ()
    named: Collection[int] = ()
    up_since: datetime | Unread | None = Unread.UP_SINCE


class _NotReadError(Exception):
    """Ends a decision for want of a fact; never leaves :func:`decide`."""

    def __init__(self, fact: Unread) -> None:
        self.fact = fact


def required(value: _T | Unread) -> _T:
    """Return a fact that has been read; where it hasn't been, end the decision."""
    if isinstance(value, Unread):
        raise _NotReadError(value)
    return value


def decide(decision: Callable[[JobFacts, QueueFacts], _T], job: JobFacts, queue: QueueFacts) -> _T | Unread:
    """Return what a decision says by the facts, or which fact it needs that hasn't been read."""
    try:
        return decision(job, queue)
    except _NotReadError as error:
        return error.fact


@dataclass(frozen=True, slots=True)
class MergedEntries:
    """The entries about one job, merged.

    :param death: the job's death
    :param job: the job from its copy, if the dead letter queue has one
    :param origin: the task that published the job, if a copy names it
    """

    death: Death
    job: StoredMessage | None = None
    origin: Origin | None = None


def merged_entries(
    job: JobFacts, queue: QueueFacts, entries: Sequence[Entry], stored: StoredMessage | None = None
) -> MergedEntries:
    """Merge some of a job's entries into one description of its death.

    :param entries: at least one
    :param stored: the job as the queue or the archive stores it, if one does: a record that contradicts this message
        isn't about the job
    """
    snapshot = queue.snapshot
    if len(entries) == 1 and entries[0].kind == EntryKind.DELIVERIES:
        # Nearly every letter's: there is nothing to merge it with, and nothing more to read.
        (entry,) = entries
        death = Death(
            *(snapshot.queue, snapshot.created, job.sequence, entry.consumer or None, Reason.MAX_DELIVERIES),
            entry.recorded_at,
            deliveries=entry.deliveries or None,
        )
        return MergedEntries(death)
    kinds = {entry.kind for entry in entries}
    copied, stored_at = _best_record(job, queue, entries, stored)
    record, message = (copied.death, copied.job) if copied else (None, None)
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
        termination = required(job.termination)
        advisory = event_of(termination, snapshot.queue, queue.domain) if termination else None
        explanation = (advisory.reason or None) if isinstance(advisory, Terminated) else None
    died_at = max((entry.recorded_at for entry in entries if entry.kind in ADVISORIES), default=None)
    if died_at is None and record and stored_at:
        died_at = min(record.died_at, stored_at)
    death = Death(
        stream=snapshot.queue,
        created=snapshot.created,
        sequence=job.sequence,
        consumer=last_consumer(entries),
        reason=reason,
        died_at=died_at or max(entry.recorded_at for entry in entries),
        first_failed_at=record.first_failed_at if record else None,
        deliveries=max(entry.deliveries for entry in entries) or None,
        explanation=explanation,
    )
    if record:
        death = replace(death, **{name: getattr(record, name) for name in _OF_RECORD})
    return MergedEntries(death, message if message and message.subject else None, copied.origin if copied else None)


def _best_record(
    job: JobFacts, queue: QueueFacts, entries: Sequence[Entry], stored: StoredMessage | None
) -> tuple[Record, datetime] | tuple[None, None]:
    """Return the most detailed record, the last one where there are several of a kind, and when it was stored.

    Any worker of the consumer may have written any of them. Where the job is stored, one that contradicts it doesn't
    count; where nothing but records is left, one with a subject that its consumer takes comes before any other.
    """
    copies = [entry for entry in entries if entry.kind in RECORDS]
    messages = required(job.records) if copies else {}
    snapshot = queue.snapshot
    subjects = snapshot.config.get("subjects") or [">"]
    other: tuple[Record, datetime] | tuple[None, None] = (None, None)
    for entry in sorted(copies, key=lambda entry: (RECORDS.index(entry.kind), -entry.sequence)):
        message = messages.get(entry.sequence)
        record = read_record(message, snapshot.queue) if message else None
        if message is None or record is None:
            continue
        if stored:
            if not contradicts(record.job, stored):
                return record, message.stored_at
        elif covered_by_any(subjects, record.job.subject) and (
            snapshot.may_have_had(record.death.consumer, record.death.sequence, record.job.subject)
        ):
            return record, message.stored_at
        elif other[0] is None:
            other = record, message.stored_at
    return other


def contradicts(job: StoredMessage, stored: StoredMessage) -> bool:
    """Return whether the job of a record isn't the stored one, by its body and the subject that the record states.

    The time that it states doesn't count: workers round it, or write that of the failure.
    """
    if job.data != stored.data:
        return True
    # A record may have a part of the subject only, and so may what the server shows.
    is_whole = job.subject and UNKNOWN_BYTE not in job.subject + stored.subject
    return bool(is_whole) and job.subject != stored.subject
