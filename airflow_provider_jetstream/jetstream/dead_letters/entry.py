"""One entry of a dead letter queue in short: which job it is about, what it states, and when; and how it is read."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from airflow_provider_jetstream.jetstream.advisories import DELETED_IN_FLIGHT, MaxDeliveries, Terminated, parse_advisory
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import (
    MAX_DELIVERIES,
    TERMINATED,
    copy_filter,
    copy_subject,
    parked_filter,
)
from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.jetstream.dead_letters.record import read_outline
from airflow_provider_jetstream.jetstream.evidence import event_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from airflow_provider_jetstream.jetstream.audit.records import LetterRecord
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.queue.consumer_state import ConsumerState
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot


class EntryKind(IntEnum):
    """What an entry of the dead letter queue is."""

    DELIVERIES = 1
    """The server's advisory that a job used up its deliveries."""
    TERMINATION = 2
    """The server's advisory that a worker terminated a job."""
    DELETION = 3
    """The server's advisory that a job was deleted while a worker had it; also sent in error after a crash."""
    COPY = 4
    """A job's copy by a worker, which may have been stopped before it terminated the job; or a scan's copy of a job
    that matches no consumer."""
    PARKED = 5
    """A copy that is out of circulation."""
    PROVEN_COPY = 6
    """A scan's copy of a job whose death the scan had proved."""
    HANDLED = 7
    """A handler acknowledged, and so removed, the advisory that a job used up its deliveries."""
    HANDLED_CLAIM = 8
    """A handler acknowledged, and so removed, what a worker brought about: a termination, or a copy of a job."""
    CLAIMED = 9
    """A redrive removed the advisory about used-up deliveries, so that no handler gets it, and was cut off then."""
    HANDLED_COPY = 10
    """A handler acknowledged, and so removed, a scan's copy of a job whose death the scan had proved."""


class Entry(NamedTuple):
    """One entry, as the index stores it.

    :param sequence: its sequence in the dead letter queue, also where it was removed
    :param kind: what it is
    :param consumer: the consumer that delivered the job, if the entry states it
    :param recorded_at: by the server's clock: when the job died, or for a worker's copy when the copy was stored; the
        epoch for a copy from an earlier stream of the same name
    :param deliveries: how often the job was delivered; 0 where the entry doesn't state it
    """

    sequence: int
    kind: EntryKind
    consumer: str | None
    recorded_at: datetime
    deliveries: int


_HANDLED = frozenset({EntryKind.HANDLED, EntryKind.HANDLED_CLAIM, EntryKind.HANDLED_COPY})
_REMOVED = _HANDLED | {EntryKind.CLAIMED}
# No stream comes as far, whatever an entry states.
HIGHEST_JOB = 2**62
ENDS = frozenset({EntryKind.TERMINATION, EntryKind.PARKED})
COPIES = frozenset({EntryKind.COPY, EntryKind.PROVEN_COPY})
DEATHS = frozenset({EntryKind.DELIVERIES, EntryKind.TERMINATION, EntryKind.PROVEN_COPY})
ADVISORIES = frozenset({EntryKind.DELIVERIES, EntryKind.TERMINATION, EntryKind.DELETION, EntryKind.CLAIMED})
# They say that a job which is gone has died.
CONTRADICTING = frozenset({EntryKind.TERMINATION, EntryKind.PARKED, EntryKind.COPY, EntryKind.PROVEN_COPY})
# What workers bring about.
BY_WORKERS = frozenset({EntryKind.TERMINATION, EntryKind.COPY, EntryKind.HANDLED_CLAIM})
_PROOFS = DEATHS | {EntryKind.HANDLED, EntryKind.HANDLED_COPY, EntryKind.CLAIMED}


def death_entries(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries that state that a job was dead while it was still stored."""
    return [entry for entry in entries if entry.kind in _PROOFS]


def stored_entries(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Return the entries that the dead letter queue stored when the index was read."""
    return tuple(entry for entry in entries if entry.kind not in _REMOVED)


def is_handled(entries: Iterable[Entry]) -> bool:
    """Return whether a handler acknowledged an entry of the job."""
    # Called for every dead letter: a list is faster here than a generator.
    return not _HANDLED.isdisjoint([entry.kind for entry in entries])


def valid_since(message: StoredMessage, consumer: ConsumerState | None, audited: LetterRecord | None) -> datetime:
    """Return when a stored job was certainly alive for the last time; older entries don't count.

    :param message: the job
    :param consumer: the consumer that it is for, if there is one; a recreated one delivers every stored job again
    :param audited: the last action on the job that the audit has
    """
    times = [message.stored_at]
    if consumer:
        times.append(consumer.created)
    if audited and audited.in_place:
        times.append(audited.at)
    return max(times)


def parked_entries(entries: Sequence[Entry], audited: LetterRecord | None) -> list[Entry]:
    """Return the records of a parked job that is gone from its queue, the last one first.

    :param audited: the last action on the job that the audit has. A redrive may have parked a job and been killed
        before it removed the original, which was requeued in place since and may have run: such a record doesn't count,
        nor does what a discarded letter had been parked as
    """
    if audited and audited.kept:
        entries = [entry for entry in entries if entry.sequence > audited.kept.last_entry]
    requeued_at = audited.at if audited and audited.in_place else None
    parked = [entry for entry in entries if entry.kind == EntryKind.PARKED]
    return [entry for entry in reversed(parked) if requeued_at is None or entry.recorded_at >= requeued_at]


def last_consumer(entries: Iterable[Entry]) -> str | None:
    """Return the consumer that the last entry with a consumer names."""
    names = [entry.consumer for entry in entries if entry.consumer]
    return names[-1] if names else None


def believed_entries(
    snapshot: QueueSnapshot, sequence: int, job: StoredMessage | None, entries: Sequence[Entry]
) -> tuple[Entry, ...]:
    """Return the entries about a job, without entries of consumers that didn't have the job.

    A worker may name the job of any consumer, so what it brings about counts only from one that may have had the job
    (``queue/filter_marks.py``).

    :param sequence: the job's stream sequence
    :param job: as the queue or the archive stores it; ``None`` where neither does
    """
    # Nearly every job's entries are the server's alone.
    if BY_WORKERS.isdisjoint([entry.kind for entry in entries]):
        return tuple(entries)
    if len({*snapshot.consumers, *[entry.consumer for entry in entries]}) == 1:
        return tuple(entries)
    if job is None:
        return _of_named(entries)
    return tuple(
        [
            entry
            for entry in entries
            if entry.kind not in BY_WORKERS
            or snapshot.may_have_had(entry.consumer, sequence, job.subject, job.stored_at)
        ]
    )


def _of_named(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Return entries without the records of consumers that no advisory names, and without contradicting terminations.

    Nothing tells which of two consumers had a job that is gone; that one used up the deliveries is the server's word.
    """
    named = {entry.consumer for entry in entries if entry.kind in ADVISORIES and entry.kind != EntryKind.TERMINATION}
    terminated = {entry.consumer for entry in entries if entry.kind == EntryKind.TERMINATION}
    if not named | terminated:
        return tuple(entries)
    believed = named or (terminated if len(terminated) == 1 else set())
    return tuple(entry for entry in entries if entry.kind not in BY_WORKERS or entry.consumer in {None, *believed})


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# An entry may state any number; these are the server's own limits.
_MAX_SEQUENCE = 2**64 - 1
_MAX_DELIVERIES = 2**32 - 1


class EntryParser:
    """Parses the entries about the jobs of one work queue.

    :param queue: the work queue
    :param created: when its stream was created, in the server's own text
    :param domain: the JetStream domain of its server; empty where it has none
    """

    def __init__(self, queue: str, created: str, domain: str = "") -> None:
        self._queue = queue
        self._created = created
        self._domain = domain
        # Each copy has a subject of its own: comparing prefixes is cheaper than a filter match, which is cached.
        self._copies = (copy_filter(queue).removesuffix(">"), parked_filter(queue).removesuffix(">"))
        self._deaths = (f"{MAX_DELIVERIES}.{queue}.*", f"{TERMINATED}.{queue}.*")

    def is_entry(self, subject: str) -> bool:
        """Return whether messages of a subject are entries about jobs of the queue."""
        return subject.startswith(self._copies) or _covered(self._deaths, subject)

    def parse(self, message: StoredMessage) -> tuple[int, Entry] | None:
        """Return the stream sequence of the job that an entry is about, and the entry; ``None`` if it states none."""
        if message.subject.startswith(self._copies):
            job = _read_copy(message, self._queue, self._created)
        else:
            job = _read_advisory(message, self._queue, self._domain)
        return job if job and 0 < job[0] <= _MAX_SEQUENCE else None

    def other_domains_consumer(self, message: StoredMessage) -> str | None:
        """Return the consumer of an advisory about a queue of the same name in another domain; ``None`` for others."""
        advisory = parse_advisory(message.data)
        if advisory is None or advisory.stream != self._queue or advisory.is_of_server(self._queue, self._domain):
            return None
        return advisory.consumer


@lru_cache(maxsize=1024)
def _covered(filters: tuple[str, ...], subject: str) -> bool:
    return covered_by_any(filters, subject)


def _read_copy(message: StoredMessage, queue: str, created: str) -> tuple[int, Entry] | None:
    if (outline := read_outline(message, queue)) is None:
        return None
    if message.subject.startswith(parked_filter(queue).removesuffix(">")):
        kind, recorded_at = EntryKind.PARKED, message.stored_at
    elif message.subject.startswith(_by_scans(queue)) and outline.reason != Reason.UNDELIVERABLE:
        # A scan states the time of death by the server's clock, a worker by its own.
        kind, recorded_at = EntryKind.PROVEN_COPY, max(_EPOCH, outline.died_at)
    else:
        kind, recorded_at = EntryKind.COPY, message.stored_at
    if outline.created not in ("", created):
        recorded_at = _EPOCH
    entry = Entry(message.sequence, kind, outline.consumer, recorded_at, _bounded(outline.deliveries))
    return outline.sequence, entry


def _by_scans(queue: str) -> str:
    """Return with what the subjects of a queue's records begin on which no worker may publish."""
    return copy_subject(queue, None, 0).removesuffix("0")


def _read_advisory(message: StoredMessage, queue: str, domain: str) -> tuple[int, Entry] | None:
    match advisory := event_of(message, queue, domain):
        case MaxDeliveries():
            kind = EntryKind.DELIVERIES
        case Terminated():
            kind = EntryKind.DELETION if advisory.reason == DELETED_IN_FLIGHT else EntryKind.TERMINATION
        case _:
            return None
    if (died_at := _time_of(advisory, message)) is None:
        return None
    deliveries = _bounded(advisory.deliveries)
    entry = Entry(message.sequence, kind, advisory.consumer, died_at, deliveries)
    return advisory.stream_seq, entry


def _time_of(advisory: MaxDeliveries | Terminated, message: StoredMessage) -> datetime | None:
    """Return when a job died by an advisory, never later than the advisory was stored; ``None`` for no such time.

    Who may publish on the server's subjects can state any time, and no redrive waits for one that is to come.
    """
    if advisory.timestamp.tzinfo is None:
        return None
    try:
        return max(_EPOCH, min(advisory.timestamp.astimezone(UTC), message.stored_at))
    except OverflowError:
        return None


def _bounded(deliveries: int | None) -> int:
    return min(max(deliveries or 0, 0), _MAX_DELIVERIES)
