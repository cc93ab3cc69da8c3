"""Sets of stream sequences as ranges: small where the sequences follow one another, whatever their number."""

from __future__ import annotations

import binascii
import zlib
from array import array
from base64 import b64decode, b64encode
from bisect import bisect_right
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# Text of a few thousand characters may stand for any number of ranges, so their number is limited: 4 MiB, of which
# the encoded form has half at most.
_MOST_RANGES: Final = 1 << 18
_MOST_ENCODED: Final = 2 << 20
_LARGEST = 2**63
# Differences are written as bytes of seven bits, the lowest first; all but the last have the highest bit set.
_BITS, _MORE, _MOST_BITS = 7, 0x80, 70


class SequenceRanges:
    """A set of stream sequences; it never changes.

    ``bounds`` has two elements for each range, its first sequence and the one after its last, in ascending order.
    """

    __slots__ = ("bounds",)

    def __init__(self, bounds: array[int] | None = None) -> None:
        self.bounds: array[int] = array("Q") if bounds is None else bounds

    @classmethod
    def between(cls, first: int, last: int) -> Self:
        """Return all sequences from one to another; none where the first is after the last."""
        return cls(array("Q", (first, last + 1) if first <= last else ()))

    @classmethod
    def of(cls, sequences: Iterable[int]) -> Self:
        """Return some sequences, which may come in any order and more than once."""
        bounds: array[int] = array("Q")
        for sequence in sorted(sequences):
            if bounds and sequence <= bounds[-1]:
                bounds[-1] = max(bounds[-1], sequence + 1)
            else:
                bounds.extend((sequence, sequence + 1))
        return cls(bounds)

    @classmethod
    def decode(cls, text: str) -> Self:
        """Read what :meth:`encode` has written of a set that :attr:`is_storable`.

        :raises ValueError: nothing has written this, or it is a larger set
        """
        decompressor = zlib.decompressobj()
        try:
            data = decompressor.decompress(b64decode(text.encode(), validate=True), _MOST_ENCODED)
        except (binascii.Error, zlib.error) as error:
            raise ValueError(f"expected encoded ranges of sequences, found otherwise: {error}") from None
        bounds: array[int] = array("Q")
        bound = delta = shift = 0
        for byte in data:
            delta |= (byte & ~_MORE) << shift
            shift += _BITS
            if byte & _MORE and shift < _MOST_BITS:
                continue
            if not delta or (bound := bound + delta) > _LARGEST:
                raise ValueError(f"expected ascending sequences, found {delta} after {bound}")
            if len(bounds) == 2 * _MOST_RANGES:
                raise ValueError(f"expected at most {_MOST_RANGES:,} ranges of sequences, found more")
            bounds.append(bound)
            delta = shift = 0
        if len(bounds) % 2 or shift or not decompressor.eof:
            raise ValueError("expected whole ranges of sequences, found a part")
        return cls(bounds)

    def encode(self) -> str:
        """Return the set as text of few characters."""
        data, previous = bytearray(), 0
        for bound in self.bounds:
            delta, previous = bound - previous, bound
            while delta >= _MORE:
                data.append(delta & ~_MORE & 0xFF | _MORE)
                delta >>= _BITS
            data.append(delta)
        return b64encode(zlib.compress(bytes(data))).decode()

    def __bool__(self) -> bool:
        return bool(self.bounds)

    def __contains__(self, sequence: object) -> bool:
        return isinstance(sequence, int) and bisect_right(self.bounds, sequence) % 2 == 1

    def __iter__(self) -> Iterator[int]:
        for first, last in self.pairs():
            yield from range(first, last + 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SequenceRanges) and self.bounds == other.bounds

    __hash__ = None  # type: ignore[assignment]

    def __or__(self, other: SequenceRanges) -> SequenceRanges:
        return _combined(self, other, lambda one, two: one or two)

    def __and__(self, other: SequenceRanges) -> SequenceRanges:
        return _combined(self, other, lambda one, two: one and two)

    def __sub__(self, other: SequenceRanges) -> SequenceRanges:
        return _combined(self, other, lambda one, two: one and not two)

    @property
    def is_storable(self) -> bool:
        """Whether :meth:`decode` reads what :meth:`encode` writes: it has at most 262,144 ranges."""
        return len(self.bounds) <= 2 * _MOST_RANGES

    @property
    def count(self) -> int:
        """The number of sequences."""
        return sum(self.bounds[1::2]) - sum(self.bounds[::2])

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Return the first and the last sequence of each range."""
        for index in range(0, len(self.bounds), 2):
            yield self.bounds[index], self.bounds[index + 1] - 1


def ranges_text(ranges: SequenceRanges, limit: int = 10) -> str:
    """Return sequences as text for people, such as ``3, 7-9 and 12 more``."""
    pairs = list(ranges.pairs())
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in pairs[:limit]]
    left_out = sum(last - first + 1 for first, last in pairs[limit:])
    return ", ".join(shown) + (f" and {left_out} more" if left_out else "")


def _combined(one: SequenceRanges, other: SequenceRanges, keep: Callable[[bool, bool], bool]) -> SequenceRanges:
    if not one.bounds or not other.bounds:
        kept = one if keep(True, False) else SequenceRanges()  # noqa: FBT003
        return kept if one.bounds else other if keep(False, True) else SequenceRanges()  # noqa: FBT003
    result: array[int] = array("Q")
    left, right, inside = 0, 0, False
    end = _LARGEST + 1
    while left < len(one.bounds) or right < len(other.bounds):
        next_left = one.bounds[left] if left < len(one.bounds) else end
        next_right = other.bounds[right] if right < len(other.bounds) else end
        bound = min(next_left, next_right)
        left += next_left == bound
        right += next_right == bound
        if keep(left % 2 == 1, right % 2 == 1) != inside:
            result.append(bound)
            inside = not inside
    return SequenceRanges(result)
