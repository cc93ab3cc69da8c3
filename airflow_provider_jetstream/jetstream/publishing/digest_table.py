"""A table of fixed-width values by 16-byte digests, in a third of the memory that a dict takes."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

DIGEST_BYTES = 16
_SMALLEST = 64


class DigestTable:
    """Values by digests; a million of them with 16 bytes each take 40 MB.

    :param width: the number of bytes of a value
    """

    def __init__(self, width: int) -> None:
        self._row_bytes = DIGEST_BYTES + width
        self._rows = bytearray()
        # By the first bytes of a digest: the number of its row, counted from 1; linear probing.
        self._slots = array("I", bytes(4 * _SMALLEST))

    def __len__(self) -> int:
        return len(self._rows) // self._row_bytes

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        for start in range(0, len(self._rows), self._row_bytes):
            row = self._rows[start : start + self._row_bytes]
            yield bytes(row[:DIGEST_BYTES]), bytes(row[DIGEST_BYTES:])

    def position(self, digest: bytes) -> int | None:
        """Return the number of a digest in the order in which digests came; ``None`` where it is unknown."""
        _, row = self._find(digest)
        return row - 1 if row else None

    def get(self, digest: bytes) -> bytes | None:
        """Return the value of a digest; ``None`` where it is unknown."""
        _, row = self._find(digest)
        if not row:
            return None
        end = row * self._row_bytes
        return bytes(self._rows[end - self._row_bytes + DIGEST_BYTES : end])

    def increment(self, digest: bytes) -> int:
        """Return the number that is the value of a digest, 0 where it is unknown, and set the next one."""
        slot, row = self._find(digest)
        width = self._row_bytes - DIGEST_BYTES
        if not row:
            self._append(slot, digest, (1).to_bytes(width))
            return 0
        end = row * self._row_bytes
        count = int.from_bytes(self._rows[end - width : end])
        self._rows[end - width : end] = (count + 1).to_bytes(width)
        return count

    def set(self, digest: bytes, value: bytes) -> None:
        """Set the value of a digest."""
        slot, row = self._find(digest)
        if row:
            end = row * self._row_bytes
            self._rows[end - self._row_bytes + DIGEST_BYTES : end] = value
            return
        self._append(slot, digest, value)

    def _append(self, slot: int, digest: bytes, value: bytes) -> None:
        self._rows += digest + value
        count = len(self)
        self._slots[slot] = count
        if 2 * count > len(self._slots):
            self._grow()

    def _find(self, digest: bytes) -> tuple[int, int]:
        """Return the slot of a digest and the number of its row; 0 where it is unknown."""
        slots, rows, row_bytes = self._slots, self._rows, self._row_bytes
        mask = len(slots) - 1
        slot = int.from_bytes(digest[:8]) & mask
        while row := slots[slot]:
            start = (row - 1) * row_bytes
            if rows[start : start + DIGEST_BYTES] == digest:
                return slot, row
            slot = (slot + 1) & mask
        return slot, 0

    def _grow(self) -> None:
        self._slots = array("I", bytes(4 * 4 * len(self._slots)))
        slots, rows, row_bytes = self._slots, self._rows, self._row_bytes
        mask = len(slots) - 1
        for row in range(1, len(self) + 1):
            start = (row - 1) * row_bytes
            slot = int.from_bytes(rows[start : start + 8]) & mask
            while slots[slot]:
                slot = (slot + 1) & mask
            slots[slot] = row
