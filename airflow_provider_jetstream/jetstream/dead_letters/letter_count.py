"""Counts the letters of a table that match a selection: by kinds of alike letters, not one by one."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from heapq import merge
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.concurrency import sleep
from airflow_provider_jetstream.jetstream.dead_letters.group import LetterGroup, LetterGroups

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField
    from airflow_provider_jetstream.jetstream.dead_letters.letter_table import AlikeLetters, LettersOfKind, LetterTable
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
# Counted and compared before other tasks of the event loop run.
_KINDS_AT_ONCE = 1_000
_LETTERS_AT_ONCE = 10_000
_RANGES_AT_ONCE = 1_000


class LetterCount:
    """Counts of the letters of one table that one selection matches; only changes are counted again.

    :param selection: by the fields of the table, without sequences
    :param group_by: fields of the table
    """

    def __init__(self, table: LetterTable, selection: Selection, group_by: Sequence[GroupField]) -> None:
        self._table = table
        self._selection = selection
        self._group_by = group_by
        # By their numbers: there may be as many kinds as letters.
        self._chosen: array[int] = array("I")
        self._kinds_seen = 0
        self._groups: LetterGroups | None = None
        self._ranges: tuple[list[tuple[int, int]], int] | None = None
        self._counted_at = -1

    @property
    def _has_age(self) -> bool:
        return self._selection.older_than is not None or self._selection.younger_than is not None

    async def groups(self, now: datetime) -> LetterGroups:
        """Return the groups; with an age, their examples may be letters of another age.

        Other tasks of the event loop run in between.

        :param now: the time that ages refer to
        """
        await self._take_new_kinds()
        if self._groups is not None and not self._has_age:
            return self._groups
        groups, (after, until) = LetterGroups(), self._span(now)
        for number, kind in enumerate(self._kinds(), 1):
            letters = self._table.letters_of(kind)
            if letters and (count := letters.times.count(after, until)) > 0:
                first, last = letters.times.next_after(after), letters.times.last_until(until)
                group = LetterGroup(count, _moment(first), _moment(last), letters.sequences[0])
                groups.merge(self._table.values_of(kind, self._group_by), group)
            if number % _KINDS_AT_ONCE == 0:
                await sleep(0)
        self._groups = groups
        return groups

    async def with_ranges(self, now: datetime, most: int) -> tuple[LetterGroups, list[tuple[int, int]], int]:
        """Return the groups, and the letters' sequences as ranges of first and last.

        Other tasks of the event loop run in between.

        :param most: how many ranges to return
        :return: groups, the first ranges, and how many ranges there are beyond them
        """
        groups = await self.groups(now)
        if self._has_age:
            groups, chosen = await self._of_age(now)
            return groups, *await sequence_ranges(chosen, most)
        if self._ranges is None:
            present = [letters for kind in self._kinds() if (letters := self._table.letters_of(kind))]
            is_all = sum(len(letters.sequences) for letters in present) == len(self._table)
            arrays = [self._table.all_sequences()] if is_all else [letters.sequences for letters in present]
            self._ranges = await sequence_ranges(arrays, most)
        ranges, beyond = self._ranges
        copied = LetterGroups()
        for key, group in groups.items():
            copied[key] = replace(group)
        return copied, list(ranges), beyond

    async def _take_new_kinds(self) -> None:
        if self._counted_at == self._table.changes:
            return
        self._groups = self._ranges = None
        while self._kinds_seen < len(self._table.kinds):
            if self._table.matches(self._selection, self._table.kinds[self._kinds_seen]):
                self._chosen.append(self._kinds_seen)
            self._kinds_seen += 1
            if self._kinds_seen % _KINDS_AT_ONCE == 0:
                await sleep(0)
        self._counted_at = self._table.changes

    def _kinds(self) -> Iterator[AlikeLetters]:
        return map(self._table.kinds.__getitem__, self._chosen)

    def _span(self, now: datetime) -> tuple[int | None, int | None]:
        """Return after which time letters died, and until when."""
        oldest, youngest = self._selection.younger_than, self._selection.older_than
        moment = (now - _EPOCH) // _MICROSECOND
        return (
            None if oldest is None else moment - oldest // 1_000,
            None if youngest is None else moment - youngest // 1_000,
        )

    async def _of_age(self, now: datetime) -> tuple[LetterGroups, list[array[int]]]:
        groups, span = LetterGroups(), self._span(now)
        chosen: list[array[int]] = []
        for kind in self._kinds():
            letters = self._table.letters_of(kind)
            if letters and (sequences := await _died_within(letters, *span)):
                after, until = span
                first, last = letters.times.next_after(after), letters.times.last_until(until)
                group = LetterGroup(len(sequences), _moment(first), _moment(last), sequences[0])
                groups.merge(self._table.values_of(kind, self._group_by), group)
                chosen.append(sequences)
        return groups, chosen


async def _died_within(letters: LettersOfKind, after: int | None, until: int | None) -> array[int]:
    """Return the sequences of the letters that died later than one time and not later than another."""
    chosen = array("Q")
    for start in range(0, len(letters.sequences), _LETTERS_AT_ONCE):
        part = slice(start, start + _LETTERS_AT_ONCE)
        chosen.extend(
            sequence
            for sequence, died_at in zip(letters.sequences[part], letters.died_at[part], strict=True)
            if (until is None or died_at <= until) and (after is None or died_at > after)
        )
        await sleep(0)
    return chosen


async def sequence_ranges(arrays: Sequence[array[int]], most: int) -> tuple[list[tuple[int, int]], int]:
    """Return sorted sequences as ranges of first and last.

    Other tasks of the event loop run in between.

    :param arrays: each sorted
    :param most: how many ranges to return
    :return: the first ranges, and how many there are beyond them
    """
    merged = arrays[0] if len(arrays) == 1 else await _merged(merge(*arrays))
    ranges: list[tuple[int, int]] = []
    position = count = 0
    while position < len(merged):
        offset = merged[position] - position
        # Within a range, sequence and position grow alike.
        end = bisect_right(range(position, len(merged)), offset, key=lambda at: merged[at] - at) + position
        if len(ranges) < most:
            ranges.append((merged[position], merged[end - 1]))
        position, count = end, count + 1
        if count % _RANGES_AT_ONCE == 0:
            await sleep(0)
    return ranges, count - len(ranges)


async def _merged(sequences: Iterable[int]) -> array[int]:
    merged = array("Q")
    for number, sequence in enumerate(sequences, 1):
        merged.append(sequence)
        if number % _LETTERS_AT_ONCE == 0:
            await sleep(0)
    return merged


def _moment(microseconds: int) -> datetime:
    return _EPOCH + timedelta(microseconds=microseconds)
