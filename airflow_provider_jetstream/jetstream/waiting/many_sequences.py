"""A set of very many sequences that never stops the event loop: it grows by parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSet
from itertools import chain
from typing import Final

from airflow_provider_jetstream.jetstream.publishing.report import sequence_ranges

# A part has up to 16,384 sequences, whose set is made anew in less than a millisecond when it grows. One set of a
# million takes 50 ms for that.
_BITS: Final = 14


class ManySequences(MutableSet[int]):
    """A set of stream sequences, for very many of them."""

    __slots__ = ("_count", "_parts")

    def __init__(self, sequences: Iterable[int] = ()) -> None:
        self._parts: dict[int, set[int]] = {}
        self._count = 0
        for sequence in sequences:
            self.add(sequence)

    def add_range(self, first: int, last: int) -> None:
        """Add all sequences from one to another."""
        while first <= last:
            end = min(last, first | ((1 << _BITS) - 1))
            part = self._parts.setdefault(first >> _BITS, set())
            self._count -= len(part)
            part.update(range(first, end + 1))
            self._count += len(part)
            first = end + 1

    def add(self, value: int) -> None:
        """Add a sequence."""
        part = self._parts.get(value >> _BITS)
        if part is None:
            part = self._parts[value >> _BITS] = set()
        if value not in part:
            part.add(value)
            self._count += 1

    def discard(self, value: int) -> None:
        """Remove a sequence, if it is there."""
        part = self._parts.get(value >> _BITS)
        if part is not None and value in part:
            part.remove(value)
            self._count -= 1
            if not part:
                del self._parts[value >> _BITS]

    def ordered_parts(self) -> Iterator[list[int]]:
        """Yield all sequences in order, some at a time."""
        for number in sorted(self._parts):
            # It may be gone meanwhile.
            yield sorted(self._parts.get(number, ()))

    def ranges(self) -> list[tuple[int, int]]:
        """Return the first and last sequence of each run of consecutive ones."""
        ranges: list[tuple[int, int]] = []
        for part in self.ordered_parts():
            # A part is most often one run, or what is left of one.
            for first, last in sequence_ranges(part):
                if ranges and ranges[-1][1] == first - 1:
                    ranges[-1] = (ranges[-1][0], last)
                else:
                    ranges.append((first, last))
        return ranges

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int):
            return False
        part = self._parts.get(value >> _BITS)
        return part is not None and value in part

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._parts.values())

    def __len__(self) -> int:
        return self._count
