"""When the letters of one kind died, in order: first, last, and how many died within a span, whatever their number."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort_right
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# A part is split where it has twice as many.
_PART = 2_048
_last = itemgetter(-1)


class DeathTimes:
    """Times in microseconds since 1970, a sorted list in parts, so that adding one moves few of the others."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[array[int]] = []

    def __iter__(self) -> Iterator[int]:
        for part in self._parts:
            yield from part

    @property
    def first(self) -> int:
        """The first time; there has to be one."""
        return self._parts[0][0]

    @property
    def last(self) -> int:
        """The last time; there has to be one."""
        return self._parts[-1][-1]

    def add(self, time: int) -> None:
        """Add a time, whether or not it is there already."""
        if not self._parts:
            self._parts.append(array("q"))
        number = min(bisect_left(self._parts, time, key=_last), len(self._parts) - 1) if self._parts[0] else 0
        part = self._parts[number]
        insort_right(part, time)
        if len(part) >= 2 * _PART:
            self._parts[number : number + 1] = [part[:_PART], part[_PART:]]

    def remove(self, time: int) -> None:
        """Remove a time once; it has to be there."""
        number = bisect_left(self._parts, time, key=_last)
        part = self._parts[number]
        del part[bisect_left(part, time)]
        if not part:
            del self._parts[number]

    def count(self, after: int | None, until: int | None) -> int:
        """Count the times later than one and not later than another."""
        return (sum(map(len, self._parts)) if until is None else self._count(until)) - (
            0 if after is None else self._count(after)
        )

    def next_after(self, time: int | None) -> int:
        """Return the first time later than one; there has to be one."""
        if time is None:
            return self.first
        number = bisect_right(self._parts, time, key=_last)
        part = self._parts[number]
        return part[bisect_right(part, time)]

    def last_until(self, time: int | None) -> int:
        """Return the last time that isn't later than one; there has to be one."""
        if time is None:
            return self.last
        number = bisect_right(self._parts, time, key=_last)
        if number < len(self._parts) and (within := bisect_right(self._parts[number], time)):
            return self._parts[number][within - 1]
        return self._parts[number - 1][-1]

    def _count(self, until: int) -> int:
        number = bisect_right(self._parts, until, key=_last)
        before = sum(map(len, self._parts[:number]))
        return before + (bisect_right(self._parts[number], until) if number < len(self._parts) else 0)
