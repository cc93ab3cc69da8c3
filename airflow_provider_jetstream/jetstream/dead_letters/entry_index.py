"""An index of the entries of a dead letter queue: some fifteen bytes per entry, in the order of the jobs."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort_right
from collections import Counter
from datetime import UTC, datetime, timedelta
from heapq import merge
from itertools import chain, compress, islice, takewhile
from typing import TYPE_CHECKING, Final, overload

from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.streams import read_range
from airflow_provider_jetstream.jetstream.dead_letters.entry import ENDS, Entry, EntryKind, EntryParser

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.stream_api import SequenceSet

_WIDTHS: Final = "bhiq"
_BITS: Final = 10
_SIZE: Final = 1 << _BITS
_IN_PART: Final = _SIZE - 1


class PackedColumn:
    """Whole numbers from -2**63 to 2**64, in the order in which they were added.

    Neighbours in a column of an index differ little, as sequences and times do, or not at all. Then a number takes two
    to four bytes, or none.
    """

    __slots__ = ("_bases", "_last", "_length", "_parts")

    def __init__(self, values: Iterable[int] = ()) -> None:
        # A part whose numbers are all alike is ``None``, unless it is the last one, which grows.
        self._parts: list[array[int] | None] = []
        self._bases: list[int] = []
        self._last: array[int] = array(_WIDTHS[0])
        self._length = 0
        self.extend(values)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        for number in range(len(self._parts)):
            yield from self._values(number)

    @overload
    def __getitem__(self, position: int) -> int: ...
    @overload
    def __getitem__(self, position: slice) -> list[int]: ...
    def __getitem__(self, position: int | slice) -> int | list[int]:
        if isinstance(position, slice):
            return self._slice(*position.indices(self._length))
        if position < 0:
            position += self._length
        if not 0 <= position < self._length:
            raise IndexError(f"expected a position below {self._length}, found {position}")
        number = position >> _BITS
        part = self._parts[number]
        return self._bases[number] if part is None else self._bases[number] + part[position & _IN_PART]

    def __setitem__(self, position: int, value: int) -> None:
        number = position >> _BITS
        part = self._parts[number]
        if part is None:
            part = self._parts[number] = array(_WIDTHS[0], bytes(_SIZE))
        try:
            part[position & _IN_PART] = value - self._bases[number]
        except OverflowError:
            values = self._values(number)
            values[position & _IN_PART] = value
            self._bases[number], part = _packed(values)
            self._parts[number] = part
            if number == len(self._parts) - 1:
                self._last = part

    def at(self, positions: Sequence[int]) -> list[int]:
        """Return the numbers at positions; fast where these follow each other."""
        start, count = positions[0] if positions else 0, len(positions)
        if count and positions[-1] - start == count - 1 and list(positions) == [*range(start, start + count)]:
            return self[start : start + count]
        return [self[position] for position in positions]

    def append(self, value: int) -> None:
        """Add a number."""
        if not self._length & _IN_PART:
            self._begin_part(value)
        try:
            self._last.append(value - self._bases[-1])
        except OverflowError:
            self._bases[-1], self._last = _packed([*self._values(-1), value])
            self._parts[-1] = self._last
        self._length += 1

    def extend(self, values: Iterable[int]) -> None:
        """Add numbers."""
        added, start = values if isinstance(values, list) else list(values), 0
        while start < len(added):
            if not self._length & _IN_PART:
                self._begin_part(added[start])
            some = added[start : start + _SIZE - (self._length & _IN_PART)]
            base, width = self._bases[-1], self._last.typecode
            try:
                self._last.extend(array(width, [value - base for value in some]))
            except OverflowError:
                self._bases[-1], self._last = _packed([*self._values(-1), *some])
                self._parts[-1] = self._last
            self._length += len(some)
            start += len(some)

    def bisect_left(self, value: int) -> int:
        """Return how many numbers are lower, in a column whose numbers rise; faster than :func:`bisect.bisect_left`."""
        number = max(0, bisect_left(self._bases, value) - 1)
        if not self._length:
            return 0
        part, base = self._parts[number], self._bases[number]
        within = _SIZE * (value > base) if part is None else bisect_left(part, value - base)
        return (number << _BITS) + within

    def _begin_part(self, value: int) -> None:
        if self._parts:
            # Without room for more numbers.
            self._parts[-1] = array(self._last.typecode, self._last) if any(self._last) else None
        self._last = array(_WIDTHS[0])
        self._parts.append(self._last)
        self._bases.append(value)

    def _slice(self, start: int, stop: int, step: int) -> list[int]:
        if step != 1 or start >= stop:
            return [self[position] for position in range(start, stop, step)]
        values: list[int] = []
        for number in range(start >> _BITS, ((stop - 1) >> _BITS) + 1):
            begin = number << _BITS
            values += self._values(number, max(0, start - begin), min(_SIZE, stop - begin))
        return values

    def _values(self, number: int, start: int = 0, stop: int = _SIZE) -> list[int]:
        part, base = self._parts[number], self._bases[number]
        if part is None:
            return [base] * (stop - start)
        whole = start == 0 and stop == _SIZE
        return [base + difference for difference in (part if whole else part[start:stop])]


def _packed(values: list[int]) -> tuple[int, array[int]]:
    """Return a number, and how much others differ from it."""
    base = values[0]
    differences = [value - base for value in values]
    for width in _WIDTHS:
        try:
            return base, array(width, differences)
        except OverflowError:
            continue
    base = min(values)
    return base, array("Q", [value - base for value in values])


# An entry whose place is among the last ones of a run is put there; moving more than these takes too long.
_NEAR_END = 16_384
_MOST_RUNS = 8


class EntryOrder:
    """Positions in a column of sequences, sorted by these; those of one sequence in the order of the column.

    Jobs die almost in the order of their sequences, and copies of letters are stored in it as well. So the positions
    are kept as few sorted runs: adding one takes the same time however many there are.

    :param sequences: the column, to which elements are only appended
    """

    def __init__(self, sequences: PackedColumn | Sequence[int]) -> None:
        self._sequences = sequences
        self._runs: list[array[int]] = []
        self._ordered = 0
        # The sequence at the end of the last run.
        self._highest = 0

    def take_new(self) -> None:
        """Put the elements in order that were appended to the column since the last call."""
        for position in range(self._ordered, len(self._sequences)):
            self._add(position, self._sequences[position])
        self._ordered = len(self._sequences)

    def of(self, sequence: int) -> list[int]:
        """Return the positions of one sequence."""
        found: list[int] = []
        for run in self._runs:
            at = bisect_left(run, sequence, key=self._sequences.__getitem__)
            # Few elements have one sequence: no second search for the last of them.
            while at < len(run) and self._sequences[run[at]] == sequence:
                found.append(run[at])
                at += 1
        return found

    def after(self, sequence: int = 0) -> Iterator[int]:
        """Return the positions of all higher sequences in order."""
        starts = [bisect_right(run, sequence, key=self._sequences.__getitem__) for run in self._runs]
        parts = [_from(run, start) for run, start in zip(self._runs, starts, strict=True)]
        return parts[0] if len(parts) == 1 else merge(*parts, key=self._sequences.__getitem__)

    def _add(self, position: int, sequence: int) -> None:
        if self._runs:
            run = self._runs[-1]
            if sequence >= self._highest:
                self._highest = sequence
                run.append(position)
                return
            near = len(run) - _NEAR_END
            if near <= 0 or sequence >= self._sequences[run[near]]:
                insort_right(run, position, max(0, near), key=self._sequences.__getitem__)
                return
        self._runs.append(array("I", (position,)))
        if len(self._runs) > _MOST_RUNS:
            self._merge_last()
        self._highest = self._sequences[self._runs[-1][-1]]

    def _merge_last(self) -> None:
        """Merge the last runs, as far as those before aren't much longer: so each position is merged a few times."""
        merged = self._runs.pop()
        while len(self._runs) >= _MOST_RUNS or (self._runs and len(self._runs[-1]) < 2 * len(merged)):
            # Stable, so that the entries of a job keep their order; sorted parts are joined fast.
            before = self._runs.pop()
            merged = array("I", sorted(chain(before, merged), key=self._sequences.__getitem__))
        self._runs.append(merged)


def _from(run: array[int], start: int) -> Iterator[int]:
    # A slice of an iterator would first count the elements before it, in one call: 10 ms and more for a million.
    while start < len(run):
        yield run[start]
        start += 1


_MICROSECOND = timedelta(microseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Marks an entry that was removed from the dead letter queue.
_DROPPED = 0
# Looked up for every dead letter, at a fifth of what a call of the enumeration takes.
_KINDS = {int(kind): kind for kind in EntryKind}
# Few enough that what changes meanwhile is soon noticed.
_TOGETHER = 64
# Looking up one job takes as long as passing so many entries.
_LOOKED_UP = 32
_COLUMNS: Final = ("_sequences", "_entries", "_kinds", "_consumers", "_recorded_at", "_deliveries")


class EntryIndex:
    """The entries of a dead letter queue by job.

    ``unreadable`` counts entries that don't state which job they are about, ``of_other_domain`` by consumer advisories
    about a queue of the same name in another JetStream domain, ``read_to`` is the last sequence of the dead letter
    queue that was read, and ``drops`` counts the entries that were dropped.
    """

    def __init__(self) -> None:
        self.unreadable = 0
        self.of_other_domain: Counter[str] = Counter()
        self.read_to = 0
        self._sequences = PackedColumn()
        self._entries = PackedColumn()
        self._kinds = PackedColumn()
        self._consumers = PackedColumn()
        self._recorded_at = PackedColumn()
        self._deliveries = PackedColumn()
        self._names: list[str | None] = []
        self._numbers: dict[str | None, int] = {}
        self._order = EntryOrder(self._sequences)
        self._deletions: array[int] = array("Q")
        self.drops = 0
        # The position before which all entries are dropped.
        self._first_kept = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: int) -> bool:
        return any(self._kinds[position] for position in self._order.of(sequence))

    def add(self, sequence: int, entry: Entry) -> None:
        """Add an entry; entries are added in the order of the dead letter queue.

        :param sequence: the stream sequence of the job that the entry is about
        """
        if entry.consumer not in self._numbers:
            self._numbers[entry.consumer] = len(self._names)
            self._names.append(entry.consumer)
        if entry.kind == EntryKind.DELETION:
            self._deletions.append(sequence)
        self._sequences.append(sequence)
        self._entries.append(entry.sequence)
        self._kinds.append(entry.kind)
        self._consumers.append(self._numbers[entry.consumer])
        self._recorded_at.append((entry.recorded_at - _EPOCH) // _MICROSECOND)
        self._deliveries.append(entry.deliveries)
        self._order.take_new()

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

    def entry_sequences(self) -> frozenset[int]:
        """Return the sequences of all entries in the dead letter queue."""
        return frozenset(compress(self._entries, self._kinds))

    def entries_of(self, sequence: int) -> tuple[Entry, ...]:
        """Return the entries about one job.

        :param sequence: the job's stream sequence
        """
        return tuple(filter(None, self._entries_at(self._order.of(sequence))))

    def drop_missing(self, stored: SequenceSet) -> set[int]:
        """Forget the entries that aren't stored any more, where no entry of :mod:`.removed_entries` was added.

        :param stored: the exact sequences of the dead letter queue; later entries stay
        :return: the stream sequences of the jobs that they were about
        """
        jobs: set[int] = set()
        kept = bisect_left(self._entries, stored.first)
        positions = [*range(self._first_kept, kept)]
        self._first_kept = max(self._first_kept, kept)
        for entry in stored.deleted:
            position = bisect_left(self._entries, entry)
            if position < len(self) and self._entries[position] == entry:
                positions.append(position)
        for position in positions:
            if self._kinds[position] != _DROPPED:
                self._kinds[position] = _DROPPED
                self.drops += 1
                jobs.add(self._sequences[position])
        return jobs

    def sequences(self, last: int) -> Iterator[int]:
        """Return in order the stream sequences of the jobs that have entries.

        :param last: the last stream sequence
        """
        current = 0
        for position in self._order.after():
            sequence = self._sequences[position]
            if sequence > last:
                return
            if sequence != current and self._kinds[position]:
                yield sequence
                current = sequence

    def has_end(self, sequence: int, since: datetime) -> bool:
        """Return whether an entry states how a job left the queue.

        :param since: entries of earlier times are about other jobs
        """
        entries = self.entries_of(sequence)
        return any(entry.kind in ENDS and entry.recorded_at >= since for entry in entries)

    def last_recorded(self) -> dict[str, datetime]:
        """Return by consumer when its last entry was recorded."""
        latest: dict[int, int] = {}
        for consumer, kind, recorded_at in zip(self._consumers, self._kinds, self._recorded_at, strict=True):
            if kind and recorded_at > latest.get(consumer, -1):
                latest[consumer] = recorded_at
        times = ((self._names[number], time) for number, time in latest.items())
        return {name: _EPOCH + timedelta(microseconds=time) for name, time in times if name}

    def deleted_in_flight(self) -> Iterator[int]:
        """Return the jobs that only the server reports as deleted while a worker had them."""
        for job in dict.fromkeys(self._deletions):
            kinds = {entry.kind for entry in self.entries_of(job)}
            if kinds == {EntryKind.DELETION}:
                yield job

    def jobs(self, after: int = 0) -> Iterator[tuple[int, tuple[Entry, ...]]]:
        """Return in order each job's stream sequence and its entries.

        :param after: only jobs of higher sequences
        """
        entries: list[Entry] = []
        current = 0
        positions = self._order.after(after)
        while some := list(islice(positions, _TOGETHER)):
            for sequence, entry in zip(self._sequences.at(some), self._entries_at(some), strict=True):
                if entry is None:
                    continue
                if sequence != current and entries:
                    yield current, tuple(entries)
                    entries = []
                current = sequence
                entries.append(entry)
        if entries:
            yield current, tuple(entries)

    def part(self, jobs: Sequence[int]) -> EntryIndex:
        """Return an index of the entries about some jobs, for another process.

        :param jobs: stream sequences in order, at least one
        """
        if len(jobs) * _LOOKED_UP < len(self):
            positions = [position for job in jobs for position in self._order.of(job)]
        else:
            wanted, last = frozenset(jobs), jobs[-1]
            ordered = takewhile(lambda position: self._sequences[position] <= last, self._order.after(jobs[0] - 1))
            positions = [position for position in ordered if self._sequences[position] in wanted]
        positions = [position for position in positions if self._kinds[position]]
        part = EntryIndex()
        part._names, part._numbers = [*self._names], {**self._numbers}
        for name in _COLUMNS:
            getattr(part, name).extend(getattr(self, name).at(positions))
        part._order.take_new()
        part._deletions = array("Q", (job for job in self._deletions if job in part))
        return part

    def _entries_at(self, positions: Sequence[int]) -> list[Entry | None]:
        """Return entries by their positions; ``None`` for a dropped entry."""
        names = self._names
        columns = (self._entries, self._kinds, self._consumers, self._recorded_at, self._deliveries)
        return [
            Entry(sequence, _KINDS[kind], names[consumer], _EPOCH + timedelta(microseconds=recorded_at), deliveries)
            if kind
            else None
            for sequence, kind, consumer, recorded_at, deliveries in zip(
                *(column.at(positions) for column in columns), strict=True
            )
        ]


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
