"""Reads an entry of a dead letter queue: which job it is about, what it states, and when."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING

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
from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry, EntryKind
from airflow_provider_jetstream.jetstream.dead_letters.record import read_outline
from airflow_provider_jetstream.jetstream.evidence import event_of

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage

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
