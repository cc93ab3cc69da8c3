"""Messages' own headers as keys and values, of many messages at once.

Protocol: headers in "NATS Client Protocol".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from airflow_provider_jetstream.spark.wire.arrow_buffers import as_text, contents, gathered

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

_LF, _CR, _COLON, _SPACE, _TAB = b"\n\r: \t"
_FIRST_LINE = len(b"NATS/1.0\r\n")

HEADERS = pa.list_(
    pa.field("element", pa.struct([pa.field("key", pa.string()), pa.field("value", pa.string())])),
)


def pairs(buffer: bytearray | bytes, starts: Integers, ends: Integers) -> pa.ListArray:
    """Read messages' own headers.

    :param buffer: where they lie
    :param starts: where each header begins, with its first line; the same as its end where there is none
    :param ends: where its last line ends, with or without the empty line after it
    :return: keys and values in order
    """
    # A header that begins at its end is none; the others begin with a line that isn't a pair.
    blocks = gathered(buffer, np.minimum(starts + _FIRST_LINE, ends), ends)
    content, bounds = contents(blocks)
    feeds = np.flatnonzero(content == _LF)
    line = np.concatenate([[0], feeds[:-1] + 1]) if len(feeds) else feeds
    line_end = feeds - 1
    line, line_end, regular = line[line_end > line], line_end[line_end > line], bool((content[line_end] == _CR).all())
    colons = np.flatnonzero(content == _COLON)
    at = np.searchsorted(colons, line)
    if not regular or (len(line) and at[-1] == len(colons)):
        return _one_by_one(blocks)
    colon = colons[at] if len(line) else line
    value = colon + 1
    value = value + ((content[value] == _SPACE) & (value < line_end))
    edges = np.concatenate([content[value], content[line_end - 1]])[np.tile(value < line_end, 2)]
    if ((colon >= line_end) | (colon == line)).any() or ((edges == _SPACE) | (edges == _TAB)).any():
        return _one_by_one(blocks)
    keys, values = as_text(gathered(content, line, colon)), as_text(gathered(content, value, line_end))
    structs = pa.StructArray.from_arrays([keys, values], names=["key", "value"])
    return pa.ListArray.from_arrays(pa.array(np.searchsorted(line, bounds), pa.int32()), structs, type=HEADERS)


def _one_by_one(blocks: pa.BinaryArray) -> pa.ListArray:
    return pa.array([own_pairs(block) for block in blocks.to_pylist()], HEADERS)


def own_pairs(block: bytes) -> list[dict[str, str]]:
    """Read the headers of one message.

    :param block: its lines, without the first
    :return: keys and values in order, without the space around values
    """
    found = []
    for line in block.split(b"\r\n"):
        key, colon, value = line.partition(b":")
        if colon and key:
            found.append({"key": key.decode(errors="replace"), "value": value.strip(b" \t").decode(errors="replace")})
    return found
