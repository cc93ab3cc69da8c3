"""An index of the entries of a dead letter queue: a few dozen bytes per entry, in the order of the jobs."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort_right
from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

from airflow_provider_jetstream.jetstream.client.message_reader import read_range
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry, EntryKind
from airflow_provider_jetstream.jetstream.dead_letters.entry_parser import EntryParser

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Iterator, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.stream_api import SequenceSet

_MICROSECOND = timedelta(microseconds=1)
_ENDS = frozenset({EntryKind.TERMINATION, EntryKind.PARKED})
_COPIES = frozenset({EntryKind.COPY, EntryKind.PROVEN_COPY})
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Marks an entry that was removed from the dead letter queue.
_DROPPED = 0
# Up to so many new entries are put in their places one by one; more are sorted together with the others.
_FEW_NEW = 1_000


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
        return any(self._kinds[position] for position in self._positions(sequence))

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

    async def read(
        self, connection: Connection, dead_letter_queue: str, parser: EntryParser, start: int, stop: int
    ) -> AsyncGenerator[tuple[int, int], None]:
        """Read more entries of a dead letter queue.

        :param parser: of the entries about the jobs of the work queue
        :param start: the first entry to read
        :param stop: the last one
        :return: the sequence of each stored message, and of the job that it is about; 0 for none
        """
        async for message in read_range(connection, dead_letter_queue, start=start, stop=stop):
            is_entry = parser.is_entry(message.subject)
            job = parser.parse(message) if is_entry else None
            if job:
                self.add(*job)
            elif is_entry and (other := parser.other_domains_consumer(message)):
                self.of_other_domain[other] += 1
            elif is_entry:
                self.unreadable += 1
            yield message.sequence, job[0] if job else 0
        self.read_to = stop

    def contains_kind(self, kind: EntryKind) -> bool:
        """Return whether any entry is of a kind."""
        return kind in self._kinds

    def entry_sequences(self) -> frozenset[int]:
        """Return the sequences of all entries in the dead letter queue."""
        return frozenset(compress(self._entries, self._kinds))

    def entries_of(self, sequence: int) -> tuple[Entry, ...]:
        """Return the entries about one job.

        :param sequence: the job's stream sequence
        """
        return tuple(self._entry(position) for position in self._positions(sequence) if self._kinds[position])

    def drop_missing(self, stored: SequenceSet) -> set[int]:
        """Forget the entries that aren't stored any more, where no entry of :mod:`.removed_entries` was added.

        :param stored: the exact sequences of the dead letter queue; later entries stay
        :return: the stream sequences of the jobs that they were about
        """
        jobs: set[int] = set()
        positions = [*range(bisect_left(self._entries, stored.first))]
        for entry in stored.deleted:
            position = bisect_left(self._entries, entry)
            if position < len(self) and self._entries[position] == entry:
                positions.append(position)
        for position in positions:
            if self._kinds[position] != _DROPPED:
                self._kinds[position] = _DROPPED
                jobs.add(self._sequences[position])
        return jobs

    def sequences(self, last: int) -> Iterator[int]:
        """Return in order the stream sequences of the jobs that have entries.

        :param last: the last stream sequence
        """
        current = 0
        for position in self._sorted():
            sequence = self._sequences[position]
            if sequence > last:
                return
            if sequence != current and self._kinds[position]:
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
            if sequence <= after or not self._kinds[position]:
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

    def _positions(self, sequence: int) -> array[int]:
        order = self._sorted()
        first = bisect_left(order, sequence, key=self._sequences.__getitem__)
        return order[first : bisect_right(order, sequence, first, key=self._sequences.__getitem__)]

    def _sorted(self) -> array[int]:
        sorted_before = len(self._order)
        if len(self) - sorted_before > _FEW_NEW:
            # Stable, so that the entries of a job keep their order.
            self._order = array("Q", sorted(range(len(self)), key=self._sequences.__getitem__))
        for position in range(len(self._order), len(self)):
            insort_right(self._order, position, key=self._sequences.__getitem__)
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
    async for _ in index.read(
        connection, dead_letter_queue, EntryParser(queue, created, connection.domain), start, stop
    ):
        pass
    return index
