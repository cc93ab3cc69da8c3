"""The indexed fields of letters as columns, some twenty bytes a letter, and how many letters of each kind there are."""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_right, insort_right
from datetime import UTC, datetime, timedelta
from itertools import chain, compress
from typing import TYPE_CHECKING, NamedTuple

from airflow_provider_jetstream.jetstream.dead_letters.group import LetterGroup
from airflow_provider_jetstream.jetstream.dead_letters.packed_column import PackedColumn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

# A letter that died before so many others is put in its place when the order is asked for.
_NEAR_END = 16_384
# So many letters are read before other tasks of the event loop run.
STEP = 16_384
_ROWS_AT_ONCE = 1_000
# Reading one value by itself takes as long as reading so many that are next to each other.
_SPARSE = 6
_FEW_KINDS = 256
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class LetterRow(NamedTuple):
    """A letter's row.

    :param entry: the last entry of the dead letter queue about it; 0 where there is none
    :param kind: the number of its kind
    :param subject: the number of its subject
    :param job: a digest of its job's id
    :param died_at: microseconds since 1970
    """

    sequence: int
    entry: int
    kind: int
    subject: int
    job: int
    died_at: int


class IndexedColumns:
    """Letters in the order of their sequences; those that are there never change place."""

    def __init__(self) -> None:
        self.sequence = PackedColumn()
        self.entry = PackedColumn()
        self.kind = PackedColumn()
        self.subject = PackedColumn()
        self.job: array[int] = array("Q")
        self.died_at = PackedColumn()
        self.kinds = KindCounts()
        self._by_death: array[int] = array("I")
        self._late: array[int] = array("I")
        # Of each part that is full.
        self._kinds_of_parts: list[KindCounts] = []

    def __len__(self) -> int:
        return len(self.died_at)

    def append(self, row: LetterRow) -> None:
        """Add a letter whose sequence is higher than those of all before."""
        for name, value in zip(row._fields, row, strict=True):
            getattr(self, name).append(value)
        self.kinds.add(row.kind, row.died_at, row.sequence)
        self._put_in_order(len(self) - 1, row.died_at)

    def position(self, sequence: int) -> int | None:
        """Return where a letter is; ``None`` where it isn't."""
        position = self.sequence.bisect_left(sequence)
        return position if position < len(self) and self.sequence[position] == sequence else None

    def by_death(self) -> array[int]:
        """Return the positions of all letters in the order of their times of death."""
        if self._late:
            died_at = self.died_at.__getitem__
            late, before, begin = array("I", sorted(self._late, key=died_at)), self._by_death, 0
            self._by_death, self._late = array("I"), array("I")
            # In parts, so that never all of them are Python's numbers.
            for start in range(0, len(before), STEP):
                part = before[start : start + STEP]
                end = bisect_right(late, died_at(part[-1]), begin, key=died_at)
                self._by_death.extend(sorted(chain(part, late[begin:end]), key=died_at))
                begin = end
            self._by_death.extend(late[begin:])
        return self._by_death

    async def kinds_of(self, positions: Sequence[int]) -> KindCounts:
        """Return how many of some letters there are of each kind.

        :param positions: where they are, in order
        """
        kinds = KindCounts()
        async for part in in_steps(positions):
            kinds.add_all(*(values_at(column, part) for column in (self.kind, self.died_at, self.sequence)))
        return kinds

    @property
    def has_few_kinds(self) -> bool:
        """Whether :meth:`kinds_of_time` needs little memory."""
        return len(self.kinds) <= _FEW_KINDS

    async def kinds_of_time(self, begin: int, end: int) -> KindCounts:
        """Return how many letters of each kind died in a time.

        Of the parts in which all did or none did, no letter is looked at: letters die almost in order.

        :param begin: microseconds since 1970
        :param end: the first moment after that time
        """
        kinds, number = KindCounts(), 0
        async for part in in_steps(range(len(self)), STEP):
            if number < len(self._kinds_of_parts):
                known = self._kinds_of_parts[number]
            else:
                known = await self.kinds_of(part)
                if len(part) == STEP and number == len(self._kinds_of_parts):
                    self._kinds_of_parts.append(known)
            number += 1
            if known.died_in(begin, end):
                kinds.merge(known)
            elif known.may_have_died_in(begin, end):
                times = values_at(self.died_at, part)
                positions = array("I", compress(part, [begin <= at < end for at in times]))
                kinds.merge(await self.kinds_of(positions))
        return kinds

    async def changed(self, rows: Iterable[tuple[int, LetterRow | None]]) -> IndexedColumns:
        """Return columns with some letters added, replaced or removed.

        :param rows: by sequence, in order; ``None`` for one that is removed
        """
        made, start = IndexedColumns(), 0
        for number, (sequence, row) in enumerate(rows, 1):
            position = self.sequence.bisect_left(sequence)
            await made._extend(self, start, position)
            start = position + (position < len(self) and self.sequence[position] == sequence)
            if row is not None:
                made.append(row)
            if number % _ROWS_AT_ONCE == 0:
                await asyncio.sleep(0)
        await made._extend(self, start, len(self))
        return made

    async def _extend(self, other: IndexedColumns, start: int, stop: int) -> None:
        for begin in range(start, stop, STEP):
            part = slice(begin, min(begin + STEP, stop))
            before = len(self)
            for name in LetterRow._fields:
                getattr(self, name).extend(getattr(other, name)[part])
            died_at = other.died_at[part]
            self.kinds.add_all(other.kind[part], died_at, other.sequence[part])
            for position, at in enumerate(died_at, before):
                self._put_in_order(position, at)
            if part.stop - begin == STEP:
                await asyncio.sleep(0)

    def _put_in_order(self, position: int, died_at: int) -> None:
        order = self._by_death
        if not order or died_at >= self.died_at[order[-1]]:
            order.append(position)
        elif (near := len(order) - _NEAR_END) <= 0 or died_at >= self.died_at[order[near]]:
            insort_right(order, position, max(0, near), key=self.died_at.__getitem__)
        else:
            self._late.append(position)


class KindCounts:
    """Of each kind how many letters there are, when the first and the last of them died, and the lowest sequence."""

    def __init__(self) -> None:
        self.count: array[int] = array("I")
        self.first: array[int] = array("q")
        self.last: array[int] = array("q")
        self.example: array[int] = array("Q")

    def __len__(self) -> int:
        return len(self.count)

    def add(self, kind: int, died_at: int, sequence: int) -> None:
        """Count a letter; letters come in the order of their sequences."""
        while kind >= len(self.count):
            for column in (self.count, self.first, self.last, self.example):
                column.append(0)
        if self.count[kind] == 0:
            self.first[kind] = self.last[kind] = died_at
            self.example[kind] = sequence
        elif died_at > self.last[kind]:
            self.last[kind] = died_at
        elif died_at < self.first[kind]:
            self.first[kind] = died_at
        self.count[kind] += 1

    def add_all(self, kinds: Sequence[int], died_at: Sequence[int], sequences: Sequence[int]) -> None:
        """Count letters, whose fields are given in the order of their sequences."""
        if not kinds:
            return
        if kinds.count(kinds[0]) == len(kinds):
            # Neighbours are alike most often: no look at each.
            kind, last = kinds[0], max(died_at)
            self.add(kind, min(died_at), sequences[0])
            self.count[kind] += len(kinds) - 1
            self.last[kind] = max(self.last[kind], last)
            return
        for kind, at, sequence in zip(kinds, died_at, sequences, strict=True):
            self.add(kind, at, sequence)

    def died_in(self, begin: int, end: int) -> bool:
        """Return whether all letters died in a time."""
        return all(
            begin <= first and last < end
            for count, first, last in zip(self.count, self.first, self.last, strict=True)
            if count
        )

    def may_have_died_in(self, begin: int, end: int) -> bool:
        """Return whether some of the letters may have died in a time."""
        times = zip(self.count, self.first, self.last, strict=True)
        return any(count and first < end and begin <= last for count, first, last in times)

    def merge(self, others: KindCounts) -> None:
        """Count letters that come after those that were counted."""
        for kind, count in enumerate(others.count):
            if count:
                self.add(kind, others.first[kind], others.example[kind])
                self.count[kind] += count - 1
                self.last[kind] = max(self.last[kind], others.last[kind])

    def group(self, kind: int) -> LetterGroup:
        """Return all letters of a kind."""
        return LetterGroup(self.count[kind], moment(self.first[kind]), moment(self.last[kind]), self.example[kind])


def values_at(column: PackedColumn, positions: Sequence[int]) -> list[int]:
    """Return some values of a column.

    :param positions: where they are, in order
    """
    if not positions:
        return []
    first, stop = positions[0], positions[-1] + 1
    if isinstance(positions, range):
        return column[first:stop]
    if stop - first > _SPARSE * len(positions):
        return [column[position] for position in positions]
    values = column[first:stop]
    return [values[position - first] for position in positions]


async def in_steps(items: Sequence[int], step: int = STEP) -> AsyncIterator[Sequence[int]]:
    """Return items in parts, between which other tasks of the event loop run."""
    for start in range(0, len(items), step):
        if start:
            await asyncio.sleep(0)
        yield items[start : start + step]


def microseconds(at: datetime) -> int:
    """Return a time as microseconds since 1970."""
    return (at - _EPOCH) // _MICROSECOND


def moment(at: int) -> datetime:
    """Return the time of microseconds since 1970."""
    return _EPOCH + timedelta(microseconds=at)
