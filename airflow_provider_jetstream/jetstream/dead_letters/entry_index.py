"""An index of the entries of a dead letter queue: a few dozen bytes per entry, in the order of the jobs."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from airflow_provider_jetstream.jetstream.advisories import DELETED_IN_FLIGHT, MaxDeliveries, Terminated, parse_advisory
from airflow_provider_jetstream.jetstream.client.message_reader import read_range
from airflow_provider_jetstream.jetstream.client.server_made import is_server_made
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES, MSG_ID, TERMINATED, copy_filter, parked_filter
from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry, EntryKind
from airflow_provider_jetstream.jetstream.dead_letters.record import SCAN, read_outline

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage

_MICROSECOND = timedelta(microseconds=1)
_ENDS = frozenset({EntryKind.TERMINATION, EntryKind.PARKED})
_COPIES = frozenset({EntryKind.COPY, EntryKind.PROVEN_COPY})
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# An entry may state any number; these are the server's own limits.
_MAX_SEQUENCE = 2**64 - 1
_MAX_DELIVERIES = 2**32 - 1


class EntryColumns(NamedTuple):
    """An index as columns, one element per entry, the entries of a job next to each other; for other processes.

    :param sequences: the jobs' stream sequences
    :param entries: sequences in the dead letter queue
    :param kinds: the values of the entries' kinds
    :param consumers: positions in ``names``
    :param recorded_at: microseconds since 1970
    :param deliveries: how often the jobs were delivered
    :param names: the consumers' names
    """

    sequences: array[int]
    entries: array[int]
    kinds: array[int]
    consumers: array[int]
    recorded_at: array[int]
    deliveries: array[int]
    names: Sequence[str | None]


class EntryIndex:
    """The entries of a dead letter queue by job.

    ``unreadable`` counts entries that don't state which job they are about, ``of_other_domain`` by consumer advisories
    about a queue of the same name in another JetStream domain, and ``read_to`` is the last sequence of the dead letter
    queue that was read.
    """

    def __init__(self) -> None:
        self.unreadable = 0
        self.of_other_domain: Counter[str] = Counter()
        self.read_to = 0
        self._sequences: array[int] = array("Q")
        self._entries: array[int] = array("Q")
        self._kinds: array[int] = array("B")
        self._consumers: array[int] = array("I")
        self._recorded_at: array[int] = array("q")
        self._deliveries: array[int] = array("I")
        self._names: list[str | None] = []
        self._numbers: dict[str | None, int] = {}
        self._order: array[int] = array("Q")

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: int) -> bool:
        order = self._sorted()
        position = bisect_left(order, sequence, key=self._sequences.__getitem__)
        return position < len(order) and self._sequences[order[position]] == sequence

    def add(self, sequence: int, entry: Entry) -> None:
        """Add an entry; entries are added in the order of the dead letter queue.

        :param sequence: the stream sequence of the job that the entry is about
        """
        if entry.consumer not in self._numbers:
            self._numbers[entry.consumer] = len(self._names)
            self._names.append(entry.consumer)
        self._sequences.append(sequence)
        self._entries.append(entry.sequence)
        self._kinds.append(entry.kind)
        self._consumers.append(self._numbers[entry.consumer])
        self._recorded_at.append((entry.recorded_at - _EPOCH) // _MICROSECOND)
        self._deliveries.append(entry.deliveries)

    def contains_kind(self, kind: EntryKind) -> bool:
        """Return whether any entry is of a kind."""
        return kind in self._kinds

    def entry_sequences(self) -> frozenset[int]:
        """Return the sequences of all entries in the dead letter queue."""
        return frozenset(self._entries)

    def entries_of(self, sequence: int) -> tuple[Entry, ...]:
        """Return the entries about one job.

        :param sequence: the job's stream sequence
        """
        order = self._sorted()
        first = bisect_left(order, sequence, key=self._sequences.__getitem__)
        last = bisect_right(order, sequence, key=self._sequences.__getitem__)
        return tuple(self._entry(position) for position in order[first:last])

    def sequences(self, last: int) -> Iterator[int]:
        """Return in order the stream sequences of the jobs that have entries.

        :param last: the last stream sequence
        """
        current = 0
        for position in self._sorted():
            sequence = self._sequences[position]
            if sequence > last:
                return
            if sequence != current:
                yield sequence
            current = sequence

    def has_end(self, sequence: int, since: datetime) -> bool:
        """Return whether a job is one of :meth:`jobs_with_ends`."""
        entries = self.entries_of(sequence)
        return any(entry.kind in _ENDS and entry.recorded_at >= since for entry in entries)

    def jobs_with_ends(self, since: datetime) -> Iterator[int]:
        """Return in no order the stream sequences of the jobs of which an entry states how they left the queue.

        A job that has used up its deliveries stays stored: its entry doesn't say why it is gone. Nor does a worker's
        copy, since the worker may have been stopped before it terminated the job, nor the server's report that a job
        was deleted while a worker had it: the server states that also of jobs that were done.

        :param since: entries of earlier times are about other jobs
        """
        return self._jobs_with(_ENDS, since)

    def jobs_with_copies(self, since: datetime) -> Iterator[int]:
        """Return in no order the stream sequences of the jobs that are in circulation and of which there is a copy.

        :param since: entries of earlier times are about other jobs
        """
        return self._jobs_with(_COPIES, since)

    def _jobs_with(self, kinds: Collection[EntryKind], since: datetime) -> Iterator[int]:
        first = (since - _EPOCH) // _MICROSECOND
        for sequence, kind, recorded_at in zip(self._sequences, self._kinds, self._recorded_at, strict=True):
            if kind in kinds and recorded_at >= first:
                yield sequence

    def jobs(self, after: int = 0) -> Iterator[tuple[int, tuple[Entry, ...]]]:
        """Return in order each job's stream sequence and its entries.

        :param after: only jobs of higher sequences
        """
        entries: list[Entry] = []
        current = 0
        for position in self._sorted():
            sequence = self._sequences[position]
            if sequence <= after:
                continue
            if sequence != current and entries:
                yield current, tuple(entries)
                entries = []
            current = sequence
            entries.append(self._entry(position))
        if entries:
            yield current, tuple(entries)

    def columns(self) -> EntryColumns:
        """Return all entries as columns, in the order of the jobs."""
        order = self._sorted()

        def ordered(column: array[int]) -> array[int]:
            return array(column.typecode, map(column.__getitem__, order))

        return EntryColumns(
            ordered(self._sequences),
            ordered(self._entries),
            ordered(self._kinds),
            ordered(self._consumers),
            ordered(self._recorded_at),
            ordered(self._deliveries),
            self._names,
        )

    def extend(self, columns: EntryColumns) -> None:
        """Add the entries of another index, which are about other jobs."""
        for name in columns.names:
            if name not in self._numbers:
                self._numbers[name] = len(self._names)
                self._names.append(name)
        numbers = [self._numbers[name] for name in columns.names]
        self._sequences.extend(columns.sequences)
        self._entries.extend(columns.entries)
        self._kinds.extend(columns.kinds)
        self._consumers.extend(map(numbers.__getitem__, columns.consumers))
        self._recorded_at.extend(columns.recorded_at)
        self._deliveries.extend(columns.deliveries)

    def _sorted(self) -> array[int]:
        if len(self._order) != len(self):
            # Stable, so that the entries of a job keep their order.
            self._order = array("Q", sorted(range(len(self)), key=self._sequences.__getitem__))
        return self._order

    def _entry(self, position: int) -> Entry:
        return Entry(
            sequence=self._entries[position],
            kind=EntryKind(self._kinds[position]),
            consumer=self._names[self._consumers[position]],
            recorded_at=_EPOCH + timedelta(microseconds=self._recorded_at[position]),
            deliveries=self._deliveries[position],
        )


async def read_index(
    connection: Connection, dead_letter_queue: str, queue: str, created: str, start: int = 1, stop: int | None = None
) -> EntryIndex:
    """Read the entries of a dead letter queue that are about the jobs of a work queue.

    :param created: when the work queue's stream was created, in the server's own text
    :param start: the first entry to read
    :param stop: the last one; where absent, the last one at the time of the call
    :raises NotFoundError: the dead letter queue doesn't exist
    """
    index = EntryIndex()
    if stop is None:
        stop = int((await stream_info(connection, dead_letter_queue))["state"]["last_seq"])
    index.read_to = stop
    parser = EntryParser(queue, created, connection.domain)
    async for message in read_range(connection, dead_letter_queue, start=start, stop=index.read_to):
        if not parser.is_entry(message.subject):
            continue
        if job := parser.parse(message):
            index.add(*job)
        elif other := parser.other_domains_consumer(message):
            index.of_other_domain[other] += 1
        else:
            index.unreadable += 1
    return index


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
        return subject.startswith(self._copies) or covered_by_any(self._deaths, subject)

    def parse(self, message: StoredMessage) -> tuple[int, Entry] | None:
        """Return the stream sequence of the job that an entry is about, and the entry; ``None`` if it states none."""
        if is_server_made(message):
            return None
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


def _read_copy(message: StoredMessage, queue: str, created: str) -> tuple[int, Entry] | None:
    if (outline := read_outline(message, queue)) is None:
        return None
    if message.subject.startswith(parked_filter(queue).removesuffix(">")):
        kind, recorded_at = EntryKind.PARKED, message.stored_at
    elif (message.header(MSG_ID) or "").startswith(f"dead:{SCAN}:") and outline.reason != Reason.UNDELIVERABLE:
        # A scan states the time of death by the server's clock, a worker by its own.
        kind, recorded_at = EntryKind.PROVEN_COPY, max(_EPOCH, outline.died_at)
    else:
        kind, recorded_at = EntryKind.COPY, message.stored_at
    if outline.created not in ("", created):
        recorded_at = _EPOCH
    entry = Entry(message.sequence, kind, outline.consumer, recorded_at, _bounded(outline.deliveries))
    return outline.sequence, entry


def _read_advisory(message: StoredMessage, queue: str, domain: str) -> tuple[int, Entry] | None:
    match advisory := parse_advisory(message.data):
        case MaxDeliveries():
            kind = EntryKind.DELIVERIES
        case Terminated():
            kind = EntryKind.DELETION if advisory.reason == DELETED_IN_FLIGHT else EntryKind.TERMINATION
        case _:
            return None
    if not advisory.is_of_server(queue, domain) or (died_at := _time_of(advisory, message)) is None:
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
