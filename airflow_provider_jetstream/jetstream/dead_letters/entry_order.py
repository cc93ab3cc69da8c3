"""The positions of an index's entries in the order of the jobs, kept in order while entries are added one by one."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort_right
from heapq import merge
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from airflow_provider_jetstream.jetstream.dead_letters.packed_column import PackedColumn

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
