"""The publishers' own headers of many messages, as keys and values.

Protocol: headers in "NATS Client Protocol".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from airflow_provider_jetstream.spark.wire.arrow_buffers import as_text, content_and_offsets, gather_slices

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

_LF, _CR, _COLON, _SPACE, _TAB = b"\n\r: \t"
_FIRST_LINE = len(b"NATS/1.0\r\n")

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
    return pa.ListArray.from_arrays(pa.array(np.searchsorted(line, bounds), pa.int32()), structs, type=HEADERS)


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
