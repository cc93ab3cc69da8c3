"""Counts values that anybody may have written: the most frequent ones, in limited memory."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

_T = TypeVar("_T", bound="Hashable")

_MOST_VALUES = 128


class FrequentValues(Generic[_T]):
    """Values with their numbers; of more than 128 different ones the rarer half is only counted together.

    The count of a value that was dropped and came again is too low; ``left_out`` counts what is missing.
    """

    __slots__ = ("_counts", "left_out")

    def __init__(self) -> None:
        self._counts: Counter[_T] = Counter()
        self.left_out = 0

    def add(self, value: _T) -> None:
        """Count a value."""
        self._counts[value] += 1
        if len(self._counts) > _MOST_VALUES:
            ranked = self._counts.most_common()
            self._counts = Counter(dict(ranked[: _MOST_VALUES // 2]))
            self.left_out += sum(count for _, count in ranked[_MOST_VALUES // 2 :])

    def largest(self, limit: int) -> tuple[list[tuple[_T, int]], int]:
        """Return the most frequent values, and how many were counted that aren't among them."""
        ranked = self._counts.most_common()
        return ranked[:limit], self.left_out + sum(count for _, count in ranked[limit:])
