"""Stretches of a buffer as Arrow arrays: one copy of what is wanted, none of the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from airflow_provider_jetstream.spark.wire.byte_blocks import blocks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]
    Octets = NDArray[np.uint8]


def gathered(buffer: bytearray | bytes | Octets, starts: Integers, ends: Integers) -> pa.BinaryArray:
    """Copy stretches into one array.

    :param buffer: where they lie
    :param starts: their first bytes, ascending
    :param ends: the bytes after their last; no stretch reaches into the next
    :return: an array that doesn't refer to the buffer
    """
    count = len(starts)
    if not count:
        return pa.array([], pa.binary())
    lengths = ends - starts
    width = int(lengths[0])
    if width and (lengths == width).all():
        content = blocks(np.frombuffer(buffer, np.uint8), starts, width)
        bounds = np.arange(0, width * (count + 1), width, dtype=np.int32)
        return pa.BinaryArray.from_buffers(pa.binary(), count, [None, pa.py_buffer(bounds), pa.py_buffer(content)])
    offsets = np.empty(2 * count, np.int32)
    offsets[0::2] = starts
    offsets[1::2] = ends
    # Every other element is a stretch, the ones between them are what lies between.
    both = pa.BinaryArray.from_buffers(pa.binary(), 2 * count - 1, [None, pa.py_buffer(offsets), pa.py_buffer(buffer)])
    return both.take(pa.array(np.arange(0, 2 * count, 2)))


def contents(array: pa.BinaryArray) -> tuple[Octets, NDArray[np.int32]]:
    """Look into an array that :func:`gathered` made.

    :param array: the array
    :return: its bytes, and where its elements begin, with the end as one more
    """
    if not len(array):
        return np.zeros(0, np.uint8), np.zeros(1, np.int32)
    _, offsets, content = array.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(array) + 1)
    return np.frombuffer(content, np.uint8, bounds[-1]) if content else np.zeros(0, np.uint8), bounds


def as_text(array: pa.BinaryArray) -> pa.StringArray:
    """Read bytes as UTF-8.

    :param array: the bytes
    :return: the text; what isn't UTF-8 is replaced, since Spark's strings can't hold it
    """
    try:
        return array.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([value.decode(errors="replace") for value in array.to_pylist()], pa.string())


def as_integers(array: pa.BinaryArray) -> Integers:
    """Read decimal numbers.

    :param array: their digits
    :return: the numbers
    """
    return np.asarray(array.cast(pa.string()).cast(pa.int64()))
