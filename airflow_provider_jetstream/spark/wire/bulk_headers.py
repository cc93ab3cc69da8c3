"""The publishers' own headers of many messages, as keys and values.

Protocol: headers in "NATS Client Protocol".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_jetstream.jetstream.errors import WireError
from airflow_provider_jetstream.spark.wire.arrow_buffers import (
    as_integers,
    as_text,
    content_and_offsets,
    gather_slices,
    offsets_column,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]
    Octets = NDArray[np.uint8]

_LF, _CR, _COLON, _SPACE, _TAB = b"\n\r: \t"
_FIRST_LINE = len(b"NATS/1.0\r\n")

# The server adds the size of a body that it leaves out at the end of the headers, after any that a publisher wrote.
_SIZE_LINE = r"Nats-Msg-Size: (?P<size>[0-9]+)\r\n\r\n\z"
_LONGEST_SIZE_LINE = len(b"Nats-Msg-Size: 2147483647\r\n\r\n")
_SIZE_LINE_WITHOUT_DIGITS = len(b"Nats-Msg-Size: \r\n")
_EMPTY_BLOCK = len(b"NATS/1.0\r\n\r\n")

HEADERS = pa.list_(
    pa.field("element", pa.struct([pa.field("key", pa.string()), pa.field("value", pa.string())])),
)


def header_column(buffer: bytearray | bytes, starts: Integers, ends: Integers) -> pa.ListArray:
    """Read the headers of many messages.

    :param starts: the offset of each header block, with its first line; the same as its end where there is none
    :param ends: the end of its last line, with or without the empty line after it
    """
    # A block that begins at its end is empty; every other block begins with the version line.
    blocks = gather_slices(buffer, np.minimum(starts + _FIRST_LINE, ends), ends)
    content, bounds = content_and_offsets(blocks)
    if (column := _column_of_equal_lines(content, bounds)) is not None:
        return column
    line_feeds = np.flatnonzero(content == _LF)
    line = np.concatenate([[0], line_feeds[:-1] + 1]) if len(line_feeds) else line_feeds
    line_end = line_feeds - 1
    line, line_end, regular = line[line_end > line], line_end[line_end > line], bool((content[line_end] == _CR).all())
    colons = np.flatnonzero(content == _COLON)
    index = np.searchsorted(colons, line)
    if not regular or (len(line) and index[-1] == len(colons)):
        return _headers_one_by_one(blocks)
    colon = colons[index] if len(line) else line
    value = colon + 1
    value = value + ((content[value] == _SPACE) & (value < line_end))
    edges = np.concatenate([content[value], content[line_end - 1]])[np.tile(value < line_end, 2)]
    if ((colon >= line_end) | (colon == line)).any() or ((edges == _SPACE) | (edges == _TAB)).any():
        return _headers_one_by_one(blocks)
    keys, values = as_text(gather_slices(content, line, colon)), as_text(gather_slices(content, value, line_end))
    structs = pa.StructArray.from_arrays([keys, values], names=["key", "value"])
    rows = offsets_column(np.searchsorted(line, bounds).astype(np.int32))
    return pa.ListArray.from_arrays(rows, structs, type=HEADERS)


def _column_of_equal_lines(content: Octets, bounds: NDArray[np.int32]) -> pa.ListArray | None:
    """Read headers of which each message has the same, with values of the same length; ``None`` where that isn't so.

    Publishers mostly give all messages the same headers, and traces, times and ids have one length.
    """
    count, width = len(bounds) - 1, int(bounds[1]) if len(bounds) > 1 else 0
    if not width or len(content) != count * width or (np.diff(bounds) != width).any():
        return None
    first, blocks = content[:width].tobytes(), content.reshape(count, width)
    pairs = _pairs_of(first)
    begins, ends = [begin for _, begin, _ in pairs], [end for _, _, end in pairs]
    # What isn't a value is the same everywhere, and no value has a line feed in it: so all lines are the first block's.
    if not pairs or np.count_nonzero(content == _LF) != count * first.count(b"\n"):
        return None
    as_before = (content[width:] == content[:-width]).reshape(count - 1, width).all(axis=0)
    if not all(as_before[a:b].all() for a, b in zip([0, *ends], [*begins, width], strict=True)):
        return None
    # Neither a space nor a tab is at an edge; a control character neither, but that is rare.
    if any(np.min(blocks[:, edge]) <= _SPACE for edge in (*begins, *(end - 1 for end in ends))):
        return None
    # What isn't UTF-8 is replaced in keys as in values.
    names = [key.decode(errors="replace").encode() for key, _, _ in pairs]
    keys = _repeated_lengths(pa.string(), count, list(map(len, names)), b"".join(names) * count)
    slices = _slices(content, width, begins, ends)
    values = as_text(_repeated_lengths(pa.binary(), count, [b - a for a, b in zip(begins, ends, strict=True)], slices))
    structs = pa.StructArray.from_arrays([keys, values], names=["key", "value"])
    rows = np.arange(0, len(pairs) * (count + 1), len(pairs), dtype=np.int32)
    return pa.ListArray.from_arrays(offsets_column(rows), structs, type=HEADERS)


def _slices(content: Octets, width: int, begins: list[int], ends: list[int]) -> Octets:
    """Copy the same slices of every block of a width, block by block."""
    lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
    names = [str(number) for number in range(len(lengths))]
    formats = [f"V{length}" for length in lengths]
    blocks = content.view({"names": names, "formats": formats, "offsets": begins, "itemsize": width})
    slices = np.empty(len(blocks), list(zip(names, formats, strict=True)))
    for name in names:
        slices[name] = blocks[name]
    return slices.view(np.uint8)


def _repeated_lengths(kind: pa.DataType, count: int, lengths: list[int], content: bytes | Octets) -> pa.Array:
    """Make an array of which each row's elements have the same lengths."""
    row = np.cumsum(lengths, dtype=np.int32)
    offsets = np.zeros(count * len(lengths) + 1, np.int32)
    offsets[1:] = (row + np.arange(count, dtype=np.int32)[:, None] * row[-1]).ravel()
    return pa.Array.from_buffers(kind, count * len(lengths), [None, pa.py_buffer(offsets), pa.py_buffer(content)])


def _pairs_of(block: bytes) -> list[tuple[bytes, int, int]]:
    """Return each key of a header block, and where its value begins and ends; none where a line is no plain header."""
    lines = block.split(b"\r\n")
    # The last line ends with the block, or an empty one follows it.
    if len(lines) - 1 != block.count(b"\n") or lines[-1] or not all(lines[:-2]):
        return []
    pairs, at = [], 0
    for line in filter(None, lines):
        key, colon, value = line.partition(b":")
        space = value[:1] == b" "
        if not (key and colon and value[space:]):
            return []
        pairs.append((key, at + len(key) + 1 + space, at + len(line)))
        at += len(line) + 2
    return pairs


def _headers_one_by_one(blocks: pa.BinaryArray) -> pa.ListArray:
    return pa.array([parse_header_block(block) for block in blocks.to_pylist()], HEADERS)


def parse_header_block(block: bytes) -> list[dict[str, str]]:
    """Read the headers of one message from its lines without the first; values are stripped of spaces and tabs."""
    pairs = []
    for line in block.split(b"\r\n"):
        key, colon, value = line.partition(b":")
        if colon and key:
            pairs.append({"key": key.decode(errors="replace"), "value": value.strip(b" \t").decode(errors="replace")})
    return pairs


def sizes_without_bodies(buffer: bytearray | bytes, starts: Integers, ends: Integers) -> Integers:
    """Read how many bytes the headers and the bodies have of messages that were sent without their bodies.

    :param starts: the offset of each header block, with its first line
    :param ends: the end of its empty line
    :raises WireError: a message lacks the size of its body
    """
    tails = gather_slices(buffer, np.maximum(starts, ends - _LONGEST_SIZE_LINE), ends)
    sizes = pc.struct_field(pc.extract_regex(tails, _SIZE_LINE), "size")
    if sizes.null_count:
        raise WireError("expected Nats-Msg-Size with every message without its body, found one that lacks it")
    added = np.asarray(pc.binary_length(sizes)) + _SIZE_LINE_WITHOUT_DIGITS
    return as_integers(sizes) + sizes_of_blocks(ends - starts - added)


def sizes_of_blocks(lengths: Integers) -> Integers:
    """Return how many bytes publishers' header blocks have: a message without headers has no block of its own."""
    return np.where(lengths > _EMPTY_BLOCK, lengths, 0)
