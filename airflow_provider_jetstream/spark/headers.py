"""Headers of many messages: the user's as keys and values, and those that a direct get adds at the end.

Protocol: headers in "NATS Client Protocol"; ADR-31 for the direct get.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from airflow_provider_jetstream.spark.errors import WireError
from airflow_provider_jetstream.spark.gathering import as_text, contents, gathered

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

_LF, _CR, _COLON, _SPACE, _TAB = b"\n\r: \t"
_WORD = 8
_FIRST_LINE = len(b"NATS/1.0\r\n")
# What the server writes after the message's own headers, in this order, before the empty line.
_ADDED = (b"Nats-Stream: ", b"Nats-Subject: ", b"Nats-Sequence: ", b"Nats-Time-Stamp: ")
_ADDED_IN_BATCHES = (b"Nats-Num-Pending: ", b"Nats-Last-Sequence: ")

HEADERS = pa.list_(
    pa.field("element", pa.struct([pa.field("key", pa.string()), pa.field("value", pa.string())])),
)


class Got(NamedTuple):
    """What a batch of direct gets tells of its messages.

    :param subjects: as text
    :param sequences: in the stream
    :param times: as ``timestamp[us, UTC]``
    :param own_end: where each message's own headers end, counted from the start of its header
    """

    subjects: pa.StringArray
    sequences: Integers
    times: pa.TimestampArray
    own_end: Integers


def got(headers: pa.BinaryArray) -> Got:
    """Read what the server added to the headers of messages.

    Messages may hold headers of the same names themselves: those of the server are the last ones.

    :param headers: the whole headers, at least one
    :return: what it added
    :raises WireError: it added nothing
    """
    content, bounds = contents(headers)
    feeds = np.flatnonzero(content == _LF)
    # The line feed of the empty line at the end of each.
    last = np.searchsorted(feeds, bounds[1:] - 1)
    names = _ADDED + _ADDED_IN_BATCHES
    # The line feeds that end the line before each added line, and that of the last one.
    ends = feeds[np.maximum(last[:, None] - 1 - np.arange(len(names), -1, -1), 0)]
    starts = ends[:, :-1] + 1
    if (ends[:, 0] < bounds[:-1]).any():
        raise WireError(f"expected an answer to a direct get, found the headers {headers[0].as_py()[:200]!r}")
    for at, name in enumerate(names):
        if not _all_begin(content, starts[:, at], name):
            raise WireError(f"expected {name.decode()!r} in the answer to a direct get, found something else")
    values = [gathered(content, starts[:, at] + len(name), ends[:, at + 1] - 1) for at, name in enumerate(names[:4])]
    return Got(
        as_text(values[1]),
        np.asarray(values[2].cast(pa.string()).cast(pa.int64())),
        values[3].cast(pa.string()).cast(pa.timestamp("ns", "UTC")).cast(pa.timestamp("us", "UTC"), safe=False),
        starts[:, 0] - bounds[:-1],
    )


def _all_begin(content: NDArray[np.uint8], starts: Integers, name: bytes) -> bool:
    """Tell whether a name of at least eight bytes is at all of these places, by looking at eight bytes at a time."""
    if len(content) < _WORD:
        return False
    words = np.ndarray((len(content) - _WORD + 1,), np.uint64, content, strides=(1,))
    edge = len(name) - _WORD
    return all(
        bool((words[np.minimum(starts + at, len(words) - 1)] == np.frombuffer(name, np.uint64, 1, at)[0]).all())
        for at in {*range(0, edge, _WORD), edge}
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
