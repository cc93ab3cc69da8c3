"""Sequence, time and subject of many messages: from a consumer's reply subjects, or from a direct get's headers.

Protocol: "JetStream wire API reference" in the NATS documentation; ADR-15 for reply subjects with a domain; ADR-31 for
direct gets.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from airflow_provider_jetstream.jetstream.errors import WireError
from airflow_provider_jetstream.spark.wire.arrow_buffers import (
    TIMESTAMP,
    as_integers,
    content_and_offsets,
    decimal_values,
    eight_byte_words,
    fixed_blocks,
    gather_slices,
    timestamp_column,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]
    Octets = NDArray[np.uint8]

_DOT = ord(".")
# $JS.ACK.<stream>.<consumer>.<deliveries>.<stream sequence>.<consumer sequence>.<time>.<pending>
_DOTS = 8
_BEFORE_SEQUENCE = 4
# $JS.ACK.<domain>.<account>.<stream>.… and, with some servers, one more token at the end
_DOTS_WITH_DOMAIN = 10

_LF, _COLON, _SPACE, _ZERO = b"\n: 0"
_WORD = 8
# The headers that the server adds after the publisher's own, in this order, before the empty line.
_NAMES = (
    b"Nats-Stream: ",
    b"Nats-Subject: ",
    b"Nats-Sequence: ",
    b"Nats-Time-Stamp: ",
    b"Nats-Num-Pending: ",
    b"Nats-Last-Sequence: ",
)
_FIRST_LINE = len(b"NATS/1.0\r\n")
# How much longer than the first line of its name a line may be before the headers are read in a slower way.
_SLACK = 20
_MICROSECOND_DIGITS = 6
_DATE, _SECONDS = len("2026-11-21T"), len("2026-11-21T15:10:11")
# The microseconds that each digit of hours, minutes and seconds counts.
_CLOCK = np.array([36_000, 3_600, 0, 600, 60, 0, 10, 1], np.int64) * 1_000_000
_FRACTION = 10 ** np.arange(_MICROSECOND_DIGITS - 1, -1, -1)
_DIGITS = 10


class DeliveryMetadata(NamedTuple):
    """What the reply subjects of a consumer's messages say.

    :param sequences: stream sequences
    :param positions: consumer sequences
    :param times: when the messages were stored, in nanoseconds since 1970
    :param pending: how many messages the consumer had left after the last of these
    """

    sequences: Integers
    positions: Integers
    times: Integers
    pending: int


def parse_reply_subjects(buffer: bytearray | bytes, starts: Integers, ends: Integers) -> DeliveryMetadata:
    """Parse the reply subjects of messages that one consumer delivered.

    :param starts: the offsets of the subjects, ascending; at least one
    :raises WireError: they aren't a consumer's
    """
    return _parse_uniform_replies(buffer, starts, ends) or _parse_replies(gather_slices(buffer, starts, ends))


def _parse_uniform_replies(buffer: bytearray | bytes, starts: Integers, ends: Integers) -> DeliveryMetadata | None:
    """Parse reply subjects that differ in digits only, as most consecutive ones do."""
    first = bytes(buffer[int(starts[0]) : int(ends[0])])
    tokens = first.split(b".")
    if len(tokens) != _DOTS + 1 or (ends - starts != len(first)).any():
        return None
    subjects = fixed_blocks(np.frombuffer(buffer, np.uint8), starts, len(first))
    numbers, end = [], len(first)
    for token in reversed(tokens[_BEFORE_SEQUENCE + 1 :]):
        numbers.append(decimal_values(subjects[:, end - len(token) : end]))
        end -= len(token) + 1
        if not (subjects[:, end] == _DOT).all():
            return None
    if not (subjects[:, :end] == subjects[0, :end]).all():
        return None
    pending, times, positions, sequences = numbers
    if pending is None or times is None or positions is None or sequences is None:
        return None
    return DeliveryMetadata(sequences, positions, times, int(pending[-1]))


def _parse_replies(replies: pa.BinaryArray) -> DeliveryMetadata:
    content, bounds = content_and_offsets(replies)
    dots = np.flatnonzero(content == _DOT)
    count, rest = divmod(len(dots), len(replies))
    table = dots.reshape(len(replies), count) if not rest else np.zeros((0, 0), np.int64)
    uniform = not rest and count >= _DOTS and (table[:, 0] >= bounds[:-1]).all() and (table[:, -1] < bounds[1:]).all()
    if not uniform or (count != _DOTS and count < _DOTS_WITH_DOMAIN):
        raise WireError(f"expected messages of a consumer, found the reply subject {replies[0].as_py()[:120]!r}")
    first = _BEFORE_SEQUENCE if count == _DOTS else _BEFORE_SEQUENCE + 2
    try:
        sequences, positions, times = (
            as_integers(gather_slices(content, table[:, token] + 1, table[:, token + 1]))
            for token in range(first, first + 3)
        )
        return DeliveryMetadata(sequences, positions, times, int(replies[-1].as_py().split(b".")[first + 4]))
    except ValueError:
        raise WireError(f"expected numbers in the reply subject {replies[0].as_py()[:120]!r}") from None


class DirectGetMetadata(NamedTuple):
    """What a direct get's headers say about its messages: stream sequences, and offsets in the buffer.

    :param sequences: stream sequences
    :param own_end: the end of each message's own headers
    :param subject: the beginning of its subject
    :param subject_end: the end of its subject
    :param time: the beginning of its time
    :param time_end: the end of its time, before the Z
    """

    sequences: Integers
    own_end: Integers
    subject: Integers
    subject_end: Integers
    time: Integers
    time_end: Integers


def parse_metadata(buffer: bytearray | bytes, starts: Integers, ends: Integers) -> DirectGetMetadata:
    """Parse the headers that the server added to messages.

    Messages may have headers of the same names themselves: the server's are the last ones.

    :param starts: the offsets of the header blocks, ascending; at least one
    :param ends: the end of each block, after the empty line
    :raises WireError: the server added none
    """
    data = np.frombuffer(buffer, np.uint8)
    return _parse_backwards(data, starts, ends) or _parse_by_line(data, starts, ends)


def _parse_backwards(data: Octets, starts: Integers, ends: Integers) -> DirectGetMetadata | None:
    """Search the added lines from the last one on, each within a bounded number of bytes."""
    samples = data[int(starts[0]) : int(ends[0])].tobytes().split(b"\r\n")[-2 - len(_NAMES) : -2]
    if len(samples) < len(_NAMES):
        return None
    lines: list[Integers] = []
    line = ends - len(b"\r\n")
    for name, sample in zip(reversed(_NAMES), reversed(samples), strict=True):
        start = _line_start(data, line - len(b"\r\n"), name, len(sample))
        if start is None:
            return None
        line = start
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


def _line_start(data: Octets, ends: Integers, name: bytes, length: int) -> Integers | None:
    """Find the beginnings of the lines of one header, unless one is much longer than expected."""
    longest = max(length, len(name)) + _SLACK
    if np.min(ends) < longest:
        return None
    # Mostly all lines have the expected length.
    lines = ends - length
    if length > len(name) and _all_match(data, lines - 1, b"\n" + name):
        rest = fixed_blocks(data, lines + len(name), length - len(name))
        if np.min(rest) > _SPACE:
            return lines
    line_feeds = fixed_blocks(data, ends - longest, longest)[:, ::-1] == _LF
    back = line_feeds.argmax(axis=1)
    lines = ends - back
    return lines if line_feeds[np.arange(len(back)), back].all() and _all_match(data, lines, name) else None


def _numbers(data: Octets, starts: Integers, ends: Integers) -> Integers:
    width = int(ends[0] - starts[0])
    if width and (ends - starts == width).all():
        values = decimal_values(fixed_blocks(data, starts, width))
        if values is not None:
            return values
    return as_integers(gather_slices(data, starts, ends))


def _parse_by_line(data: Octets, starts: Integers, ends: Integers) -> DirectGetMetadata:
    content, bounds = content_and_offsets(gather_slices(data, starts, ends))
    line_feeds = np.flatnonzero(content == _LF)
    # The line feed of the empty line at the end of each block.
    last = np.searchsorted(line_feeds, bounds[1:] - 1)
    # The line feed before each added line, and that of the last added line.
    line_ends = line_feeds[np.maximum(last[:, None] - 1 - np.arange(len(_NAMES), -1, -1), 0)]
    lines = line_ends[:, :-1] + 1
    if (line_ends[:, 0] < bounds[:-1]).any():
        headers = content[: bounds[1]].tobytes()[:200]
        raise WireError(f"expected an answer to a direct get, found the headers {headers!r}")
    for index, name in enumerate(_NAMES):
        if not _all_match(content, lines[:, index], name):
            raise WireError(f"expected {name.decode()!r} in the answer to a direct get, found something else")
    shift = starts - bounds[:-1]
    subject, sequence, time = (lines[:, index] + len(_NAMES[index]) for index in range(1, 4))
    return DirectGetMetadata(
        as_integers(gather_slices(content, sequence, lines[:, 3] - 2)),
        lines[:, 0] + shift,
        subject + shift,
        lines[:, 2] - 2 + shift,
        time + shift,
        lines[:, 4] - len(b"Z\r\n") + shift,
    )


def _all_match(data: Octets, offsets: Integers, text: bytes) -> bool:
    """Return whether a text of at least eight bytes is at all offsets; compares eight bytes at a time."""
    if len(data) < _WORD:
        return False
    words = eight_byte_words(data)
    edge = len(text) - _WORD
    return all(
        bool((words[np.minimum(offsets + part, len(words) - 1)] == np.frombuffer(text, np.uint64, 1, part)[0]).all())
        for part in {*range(0, edge, _WORD), edge}
    )


def parse_times(buffer: bytearray | bytes, metadata: DirectGetMetadata) -> pa.TimestampArray:
    """Parse when messages were stored, as ``timestamp[us, UTC]``."""
    if not len(metadata.time):
        return timestamp_column(metadata.sequences)
    data = np.frombuffer(buffer, np.uint8)
    text = fixed_blocks(data, metadata.time, _SECONDS)
    digits = text[:, _DATE:] - np.uint8(_ZERO)
    colons = digits[:, [2, 5]] == _COLON - _ZERO
    digits[:, [2, 5]] = 0
    columns = np.arange(_MICROSECOND_DIGITS)
    precision = np.clip(metadata.time_end - metadata.time - _SECONDS - 1, 0, _MICROSECOND_DIGITS)
    fraction = fixed_blocks(data, metadata.time + _SECONDS + 1, _MICROSECOND_DIGITS) - np.uint8(_ZERO)
    fraction[columns >= precision[:, None]] = 0
    if (
        not colons.all()
        or max(np.max(digits), np.max(fraction)) >= _DIGITS
        or not (text[:, :_DATE] == text[0, :_DATE]).all()
    ):
        return _parse_times_with_arrow(data, metadata)
    day = datetime.fromisoformat(text[0, : _DATE - 1].tobytes().decode()).replace(tzinfo=UTC)
    return timestamp_column(digits @ _CLOCK + fraction @ _FRACTION + int(day.timestamp()) * 1_000_000)


def _parse_times_with_arrow(data: Octets, metadata: DirectGetMetadata) -> pa.TimestampArray:
    text = gather_slices(data, metadata.time, metadata.time_end + 1).cast(pa.string())
    return text.cast(pa.timestamp("ns", "UTC")).cast(TIMESTAMP, safe=False)
