"""Makes message ids of rows' content, which don't depend on the order in which a partition's rows come."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

# A multiple of three, so that base64 needs no padding; too long for anybody to find two contents with one digest.
_DIGEST = 18
_KEY = 32
_FEWEST_BITS = 12
_MOST_FULL = 0.65
_MOVED_TOGETHER = 1 << 16


class DerivedIds:
    """The message ids of one partition's rows that have none of their own.

    An id is made of what identifies the partition, a digest of the content, and how many rows with that content came
    before. Whatever the order of the rows is, the same rows get the same ids.

    :param identity: of the write and the partition, with which the ids begin
    :param secret: a key of the digests, without which nobody can compute an id, however many others he sees; may be
        empty
    """

    def __init__(self, identity: bytes, secret: bytes = b"") -> None:
        self._identity = identity
        self._key = blake2b(identity, digest_size=_KEY, key=secret).digest() if secret else b""
        self._equal_rows = _EqualRows()

    def of(self, contents: Sequence[bytes]) -> pa.BinaryArray:
        """Return the ids of the rows that follow those of the last call.

        :param contents: of the rows; equal messages have equal ones
        """
        key = self._key
        digests = b"".join([blake2b(content, digest_size=_DIGEST, key=key).digest() for content in contents])
        # Two contents whose digests begin with the same eight bytes count as equal here, and have different ids: where
        # they change places in a retry, they may be stored twice, and neither is lost.
        keys = np.frombuffer(digests, np.uint8).reshape(-1, _DIGEST)[:, :8].copy().view(np.uint64).ravel()
        equal_before = self._equal_rows.count(keys)
        if key:
            digests = self._numbered(digests, equal_before)
        numbers = pa.array(equal_before).cast(pa.string()).cast(pa.binary())
        texts = pa.py_buffer(urlsafe_b64encode(digests))
        fixed = pa.FixedSizeBinaryArray.from_buffers(pa.binary(_DIGEST * 4 // 3), len(contents), [None, texts])
        return pc.binary_join_element_wise(self._identity, numbers, fixed.cast(pa.binary()), b":")

    def _numbered(self, digests: bytes, numbers: NDArray[np.int64]) -> bytes:
        """Return digests of which those of equal rows differ: one that is stored mustn't tell the next one."""
        found = bytearray(digests)
        for row in np.flatnonzero(numbers).tolist():
            place = slice(row * _DIGEST, (row + 1) * _DIGEST)
            content = b"%b%d" % (digests[place], numbers[row])
            found[place] = blake2b(content, digest_size=_DIGEST, key=self._key).digest()
        return bytes(found)


class _EqualRows:
    """Counts rows by key, in a hash table of 19 to 37 bytes for each distinct key, and 56 while the table grows."""

    def __init__(self) -> None:
        self._used = 0
        self._resize(_FEWEST_BITS)

    def count(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return, for each of these rows, how many rows before it have its key.

        :param keys: evenly distributed
        """
        # Zero marks a free slot.
        keys = np.maximum(keys, np.uint64(1))
        order = np.argsort(keys)
        ordered = keys[order]
        starts = np.flatnonzero(np.diff(ordered, prepend=np.uint64(0)))
        distinct, counts = ordered[starts], np.diff(starts, append=len(keys))
        while self._used + len(distinct) > _MOST_FULL * len(self._keys):
            self._grow()
        slots = self._slots(distinct)
        earlier = self._counts[slots].astype(np.int64)
        self._used += len(distinct) - int(np.count_nonzero(earlier))
        # Four bytes are enough: no server can know as many ids.
        self._counts[slots] = earlier + counts
        numbers = np.empty(len(keys), np.int64)
        numbers[order] = np.arange(len(keys)) - np.repeat(starts - earlier, counts)
        return numbers

    def _slots(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the slots of distinct keys, which they take if they have none yet."""
        slots = (keys >> np.uint64(64 - self._bits)).astype(np.int64)
        searching = np.arange(len(keys))
        while len(searching):
            at, wanted = slots[searching], keys[searching]
            found = self._keys[at]
            # Of several keys that take the same slot, the last one has it.
            self._keys[at] = np.where(found == 0, wanted, found)
            searching = searching[self._keys[at] != wanted]
            slots[searching] = (slots[searching] + 1) & (len(self._keys) - 1)
        return slots

    def _grow(self) -> None:
        keys, counts = self._keys, self._counts
        self._resize(self._bits + 1)
        for start in range(0, len(keys), _MOVED_TOGETHER):
            part = slice(start, start + _MOVED_TOGETHER)
            taken = keys[part] != 0
            self._counts[self._slots(keys[part][taken])] = counts[part][taken]

    def _resize(self, bits: int) -> None:
        self._bits = bits
        self._keys, self._counts = np.zeros(1 << bits, np.uint64), np.zeros(1 << bits, np.uint32)
