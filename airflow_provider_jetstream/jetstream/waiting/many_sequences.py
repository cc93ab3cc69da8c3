"""A set of very many sequences that never stops the event loop: bitmaps, each of a few."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSet
from itertools import chain
from typing import Final

from airflow_provider_jetstream.jetstream.publishing.report import sequence_ranges

# A part is a bitmap of 1,024 sequences: about as large as a set of one, where sequences are far apart. A set of a
# million has 60 MB, and stops the event loop whenever it grows and whenever Python's collector looks at it.
_BITS: Final = 10
_LAST: Final = (1 << _BITS) - 1
_BYTES: Final = 1 << _BITS - 3
_FULL: Final = b"\xff" * _BYTES


class ManySequences(MutableSet[int]):
    """A set of stream sequences, for very many of them."""

    __slots__ = ("_count", "_parts")

    def __init__(self, sequences: Iterable[int] = ()) -> None:
        self._parts: dict[int, bytearray] = {}
        self._count = 0
        for sequence in sequences:
            self.add(sequence)

    def add_range(self, first: int, last: int) -> None:
        """Add all sequences from one to another."""
        while first <= last:
            end = min(last, first | _LAST)
            if end - first == _LAST:
                number = first >> _BITS
                self._count += (1 << _BITS) - _held(self._parts.get(number, b""))
                self._parts[number] = bytearray(_FULL)
            else:
                for sequence in range(first, end + 1):
                    self.add(sequence)
            first = end + 1

    def add(self, value: int) -> None:
        """Add a sequence."""
        part = self._parts.get(value >> _BITS)
        if part is None:
            part = self._parts[value >> _BITS] = bytearray(_BYTES)
        place, bit = (value & _LAST) >> 3, 1 << (value & 7)
        if not part[place] & bit:
            part[place] |= bit
            self._count += 1

    def discard(self, value: int) -> None:
        """Remove a sequence, if it is there."""
        part = self._parts.get(value >> _BITS)
        place, bit = (value & _LAST) >> 3, 1 << (value & 7)
        if part is not None and part[place] & bit:
            part[place] ^= bit
            self._count -= 1
            if not part[place] and not any(part):
                del self._parts[value >> _BITS]

    def ordered_parts(self) -> Iterator[list[int]]:
        """Yield all sequences in order, some at a time."""
        for number in sorted(self._parts):
            # It may be gone meanwhile.
            yield _sequences(number, self._parts.get(number, b""))

    def ranges(self) -> list[tuple[int, int]]:
        """Return the first and last sequence of each run of consecutive ones."""
        ranges: list[tuple[int, int]] = []
        for number in sorted(self._parts):
            part, start = self._parts.get(number, b""), number << _BITS
            for first, last in [(start, start | _LAST)] if part == _FULL else sequence_ranges(_sequences(number, part)):
                if ranges and ranges[-1][1] == first - 1:
                    ranges[-1] = (ranges[-1][0], last)
                else:
                    ranges.append((first, last))
        return ranges

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int):
            return False
        part = self._parts.get(value >> _BITS)
        return part is not None and bool(part[(value & _LAST) >> 3] & 1 << (value & 7))

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.ordered_parts())

    def __len__(self) -> int:
        return self._count


def _held(part: bytes | bytearray) -> int:
    return int.from_bytes(part).bit_count()


def _sequences(number: int, part: bytes | bytearray) -> list[int]:
    start = number << _BITS
    return [start + 8 * place + bit for place, byte in enumerate(part) if byte for bit in range(8) if byte & 1 << bit]
