"""Vectorised reads from a receive buffer: fixed-size blocks and numbers as NumPy, byte slices as Arrow arrays.

Copying a few dozen bytes from each offset is cheap compared with a search through everything between the offsets.
Arrays are made of buffers: ``pyarrow.array`` and ``pyarrow.scalar`` import pandas where it is installed, which takes
each new process of Spark half a second and memory that it doesn't need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]
    Octets = NDArray[np.uint8]

TIMESTAMP: Final = pa.timestamp("us", "UTC")

_MOST_DIGITS = 19
_POWERS = np.array([10**exponent for exponent in reversed(range(_MOST_DIGITS))], np.int64)
_ZERO = ord("0")
_LAST_ASCII = 0x7F
_DIGITS = 10


def fixed_blocks(data: Octets, starts: Integers, width: int) -> Octets:
    """Copy blocks of one width into the rows of a matrix; every block lies within the buffer."""
    windows = np.ndarray((len(data) - width + 1,), np.dtype((np.void, width)), data, strides=(1,))
    return windows[starts].view(np.uint8).reshape(len(starts), width)


def four_byte_words(data: Octets) -> NDArray[np.uint32]:
    """Return a view of the buffer with a four-byte word at every byte."""
    return np.ndarray((len(data) - 3,), np.uint32, data, strides=(1,))


def eight_byte_words(data: Octets) -> NDArray[np.uint64]:
    """Return a view of the buffer with an eight-byte word at every byte."""
    return np.ndarray((len(data) - 7,), np.uint64, data, strides=(1,))


def decimal_values(digits: Octets) -> Integers | None:
    """Read decimal numbers of equal length, one per row; ``None`` where a byte is no digit or a number is too large."""
    width = digits.shape[1]
    numbers = digits - np.uint8(_ZERO)
    if not 0 < width <= _MOST_DIGITS or np.max(numbers, initial=0) >= _DIGITS:
        return None
    values: Integers = numbers @ _POWERS[_MOST_DIGITS - width :]
    # The largest numbers of nineteen digits overflow and come out negative.
    return values if width < _MOST_DIGITS or (values >= 0).all() else None


def gather_slices(buffer: bytearray | bytes | Octets, starts: Integers, ends: Integers) -> pa.BinaryArray:
    """Copy slices of a buffer into an Arrow array that doesn't refer to the buffer.

    The slices are in ascending order and don't overlap.
    """
    count = len(starts)
    if not count:
        return _binary_array(np.zeros(1, np.int32), b"")
    lengths = ends - starts
    width = int(lengths[0])
    if width and (lengths == width).all():
        content = fixed_blocks(np.frombuffer(buffer, np.uint8), starts, width)
        bounds = np.arange(0, width * (count + 1), width, dtype=np.int32)
        return _binary_array(bounds, content)
    offsets = np.empty(2 * count, np.int32)
    offsets[0::2] = starts
    offsets[1::2] = ends
    # Every other element is a requested slice; the elements between them are the gaps.
    return _binary_array(offsets, buffer).take(integer_column(np.arange(0, 2 * count, 2)))


def _binary_array(bounds: NDArray[np.int32], content: bytearray | bytes | Octets) -> pa.BinaryArray:
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(content)]
    return pa.BinaryArray.from_buffers(pa.binary(), len(bounds) - 1, buffers)


def content_and_offsets(array: pa.BinaryArray) -> tuple[Octets, NDArray[np.int32]]:
    """Return the bytes of an array that :func:`gather_slices` made, and the offset of each element and of the end."""
    if not len(array):
        return np.zeros(0, np.uint8), np.zeros(1, np.int32)
    _, offsets, content = array.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(array) + 1)
    return np.frombuffer(content, np.uint8, bounds[-1]) if content else np.zeros(0, np.uint8), bounds


def as_text(array: pa.BinaryArray) -> pa.StringArray:
    """Read bytes as UTF-8; what isn't UTF-8 is replaced, since Spark's strings can't hold it.

    :param array: from :func:`gather_slices`, or with buffers as that makes them
    """
    content, _ = content_and_offsets(array)
    if np.max(content, initial=0) <= _LAST_ASCII:
        # All bytes at once: a cast looks at each value by itself.
        return pa.StringArray.from_buffers(len(array), *array.buffers()[1:])
    try:
        return array.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([value.decode(errors="replace") for value in array.to_pylist()], pa.string())


def as_integers(array: pa.BinaryArray) -> Integers:
    """Read decimal numbers of any length."""
    if not len(array):
        return np.zeros(0, np.int64)
    numbers = array.cast(pa.string()).cast(pa.int64())
    return np.frombuffer(numbers.buffers()[1], np.int64, len(numbers))


def constant_column(text: str, count: int) -> pa.StringArray:
    """Make a column that repeats one value."""
    content = text.encode()
    bounds = np.arange(count + 1, dtype=np.int32) * np.int32(len(content))
    return pa.StringArray.from_buffers(count, pa.py_buffer(bounds), pa.py_buffer(content * count))


def integer_column(values: Integers) -> pa.Int64Array:
    """Make a column of integers without copying them."""
    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(values)])


def offsets_column(values: NDArray[np.int32]) -> pa.Int32Array:
    """Make the offsets of a column of lists without copying them."""
    return pa.Array.from_buffers(pa.int32(), len(values), [None, pa.py_buffer(values)])


def timestamp_column(microseconds: Integers) -> pa.TimestampArray:
    """Make a column of times from microseconds since 1970 without copying them."""
    return pa.Array.from_buffers(TIMESTAMP, len(microseconds), [None, pa.py_buffer(microseconds)])
