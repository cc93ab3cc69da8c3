"""What a direct get tells of its messages, in the headers that the server adds after the messages' own.

Protocol: ADR-31.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from airflow_provider_jetstream.jetstream.errors import WireError
from airflow_provider_jetstream.spark.source.columns import microseconds
from airflow_provider_jetstream.spark.wire.arrow_buffers import as_integers, contents, gathered
from airflow_provider_jetstream.spark.wire.byte_blocks import blocks, eights, value

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]
    Octets = NDArray[np.uint8]

_LF, _COLON, _SPACE, _ZERO = b"\n: 0"
_WORD = 8
# In this order, before the empty line.
_NAMES = (
    b"Nats-Stream: ",
    b"Nats-Subject: ",
    b"Nats-Sequence: ",
    b"Nats-Time-Stamp: ",
    b"Nats-Num-Pending: ",
    b"Nats-Last-Sequence: ",
)
_FIRST_LINE = len(b"NATS/1.0\r\n")
# By how much a line may be longer than the first one of its name before headers are read in a slower way.
_SLACK = 20
_MICROSECOND_DIGITS = 6
_DATE, _SECONDS = len("2026-11-21T"), len("2026-11-21T15:10:11")
# What each digit of hours, minutes, seconds and millionths counts, in microseconds.
_CLOCK = np.array([36_000, 3_600, 0, 600, 60, 0, 10, 1], np.int64) * 1_000_000
_MILLIONTHS = 10 ** np.arange(_MICROSECOND_DIGITS - 1, -1, -1)
_DIGITS = 10


class DirectGetMetadata(NamedTuple):
    """What a batch of direct gets tells of its messages: their sequences, and places in the buffer.

    :param sequences: in the stream
    :param own_end: where each message's own headers end
    :param subject: where its subject begins
    :param subject_end: where that ends
    :param time: where its time begins
    :param time_end: where that ends, before the Z
    """

    sequences: Integers
    own_end: Integers
    subject: Integers
    subject_end: Integers
    time: Integers
    time_end: Integers


def parse_metadata(buffer: bytearray | bytes, starts: Integers, ends: Integers) -> DirectGetMetadata:
    """Read what the server added to the headers of messages.

    Messages may hold headers of the same names themselves: those of the server are the last ones.

    :param buffer: where they lie
    :param starts: where each header begins, ascending; at least one
    :param ends: where it ends, after the empty line
    :return: what it added
    :raises WireError: it added nothing
    """
    data = np.frombuffer(buffer, np.uint8)
    return _from_the_ends(data, starts, ends) or _each(data, starts, ends)


def _from_the_ends(data: Octets, starts: Integers, ends: Integers) -> DirectGetMetadata | None:
    """Look for the added lines from the last one on, each within as many bytes as it may have."""
    like = data[int(starts[0]) : int(ends[0])].tobytes().split(b"\r\n")[-2 - len(_NAMES) : -2]
    if len(like) < len(_NAMES):
        return None
    lines: list[Integers] = []
    line = ends - len(b"\r\n")
    for name, first in zip(reversed(_NAMES), reversed(like), strict=True):
        found = _line_that_ends(data, line - len(b"\r\n"), name, len(first))
        if found is None:
            return None
        line = found
        lines.append(line)
    _, pending, time, sequence, subject, own_end = lines
    if (own_end < starts + _FIRST_LINE).any():
        return None
    return DirectGetMetadata(
        _numbers(data, sequence + len(_NAMES[2]), time - len(b"\r\n")),
        own_end,
        subject + len(_NAMES[1]),
        sequence - len(b"\r\n"),
        time + len(_NAMES[3]),
        pending - len(b"Z\r\n"),
    )


def _line_that_ends(data: Octets, ends: Integers, name: bytes, length: int) -> Integers | None:
    """Find where lines of a name begin, if none is much longer than so many bytes."""
    room = max(length, len(name)) + _SLACK
    if np.min(ends) < room:
        return None
    # Mostly all are as long.
    lines = ends - length
    if length > len(name) and _are(data, lines - 1, b"\n" + name):
        rest = blocks(data, lines + len(name), length - len(name))
        if np.min(rest) > _SPACE:
            return lines
    feeds = blocks(data, ends - room, room)[:, ::-1] == _LF
    back = feeds.argmax(axis=1)
    lines = ends - back
    return lines if feeds[np.arange(len(back)), back].all() and _are(data, lines, name) else None


def _numbers(data: Octets, starts: Integers, ends: Integers) -> Integers:
    width = int(ends[0] - starts[0])
    if width and (ends - starts == width).all() and (found := value(blocks(data, starts, width))) is not None:
        return found
    return as_integers(gathered(data, starts, ends))


def _each(data: Octets, starts: Integers, ends: Integers) -> DirectGetMetadata:
    content, bounds = contents(gathered(data, starts, ends))
    feeds = np.flatnonzero(content == _LF)
    # The line feed of the empty line at the end of each.
    last = np.searchsorted(feeds, bounds[1:] - 1)
    # The line feeds that end the line before each added line, and that of the last one.
    line_ends = feeds[np.maximum(last[:, None] - 1 - np.arange(len(_NAMES), -1, -1), 0)]
    lines = line_ends[:, :-1] + 1
    if (line_ends[:, 0] < bounds[:-1]).any():
        found = content[: bounds[1]].tobytes()[:200]
        raise WireError(f"expected an answer to a direct get, found the headers {found!r}")
    for at, name in enumerate(_NAMES):
        if not _are(content, lines[:, at], name):
            raise WireError(f"expected {name.decode()!r} in the answer to a direct get, found something else")
    shift = starts - bounds[:-1]
    subject, sequence, time = (lines[:, at] + len(_NAMES[at]) for at in range(1, 4))
    return DirectGetMetadata(
        as_integers(gathered(content, sequence, lines[:, 3] - 2)),
        lines[:, 0] + shift,
        subject + shift,
        lines[:, 2] - 2 + shift,
        time + shift,
        lines[:, 4] - len(b"Z\r\n") + shift,
    )


def _are(data: Octets, places: Integers, text: bytes) -> bool:
    """Tell whether a text of at least eight bytes is at all of these places, by looking at eight bytes at a time."""
    if len(data) < _WORD:
        return False
    found = eights(data)
    edge = len(text) - _WORD
    return all(
        bool((found[np.minimum(places + at, len(found) - 1)] == np.frombuffer(text, np.uint64, 1, at)[0]).all())
        for at in {*range(0, edge, _WORD), edge}
    )


def times(buffer: bytearray | bytes, found: DirectGetMetadata) -> pa.TimestampArray:
    """Read when messages were stored.

    :param buffer: where the headers lie
    :param found: what :func:`told` found in it
    :return: as ``timestamp[us, UTC]``
    """
    if not len(found.time):
        return microseconds(found.sequences)
    data = np.frombuffer(buffer, np.uint8)
    text = blocks(data, found.time, _SECONDS)
    digits = text[:, _DATE:] - np.uint8(_ZERO)
    # Where the colons are.
    colons = digits[:, [2, 5]] == _COLON - _ZERO
    digits[:, [2, 5]] = 0
    places = np.arange(_MICROSECOND_DIGITS)
    left = np.clip(found.time_end - found.time - _SECONDS - 1, 0, _MICROSECOND_DIGITS)
    fraction = blocks(data, found.time + _SECONDS + 1, _MICROSECOND_DIGITS) - np.uint8(_ZERO)
    fraction[places >= left[:, None]] = 0
    if (
        not colons.all()
        or max(np.max(digits), np.max(fraction)) >= _DIGITS
        or not (text[:, :_DATE] == text[0, :_DATE]).all()
    ):
        return _one_by_one(data, found)
    day = datetime.fromisoformat(text[0, : _DATE - 1].tobytes().decode()).replace(tzinfo=UTC)
    return microseconds(digits @ _CLOCK + fraction @ _MILLIONTHS + int(day.timestamp()) * 1_000_000)


def _one_by_one(data: Octets, found: DirectGetMetadata) -> pa.TimestampArray:
    text = gathered(data, found.time, found.time_end + 1).cast(pa.string())
    return text.cast(pa.timestamp("ns", "UTC")).cast(pa.timestamp("us", "UTC"), safe=False)
