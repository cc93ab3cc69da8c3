"""Whole numbers in few bytes: parts of them, each as differences from one of it."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING, Final, overload

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

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
