"""Finds many messages at once by their subscription's unguessable id, and proves that nothing else is there.

The id marks the first line of every message; sizes are read from those lines for all messages together. Where each
message ends, the line of the next one must begin, with the id in the position of an id: this proves that nothing lies
between the messages and that no mark was part of a payload. The first message begins where a frame is known to begin,
so by induction every message does. What isn't proved is parsed frame by frame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from airflow_provider_jetstream.jetstream.client.wire import MARKS, SID_LENGTH, Frame, next_frame
from airflow_provider_jetstream.spark.wire.arrow_buffers import (
    content_and_offsets,
    decimal_values,
    eight_byte_words,
    fixed_blocks,
    four_byte_words,
    gather_slices,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]
    Octets = NDArray[np.uint8]

_WORD, _QUAD = 8, 4
_FOUR_MARKS = int.from_bytes(MARKS[:_QUAD], "little")
_LONGEST_NUMBER = 10
_DIGITS = 10
_SPACE, _CR, _LF, _ZERO = b" \r\n0"
_MSG = int.from_bytes(b"MSG ", "little")
_HMSG = int.from_bytes(b"HMSG", "little")
# Where lines are at most this fraction of all bytes, only the lines are searched for their ends.
_SPARSE = 4
# How much longer than the first line a line may be before lines are searched in a slower way.
_SLACK = 16
# Below this many bytes, setting up the vectors costs more than it saves.
_WORTHWHILE = 2048


class Rows(NamedTuple):
    """Offsets of the parts of messages in a buffer, a vector for each part of a :class:`Frame`."""

    subject: Integers
    subject_end: Integers
    reply: Integers
    reply_end: Integers
    header: Integers
    body: Integers
    end: Integers

    def where(self, chosen: NDArray[np.bool_] | slice) -> Rows:
        """Select messages by a mask or a slice."""
        return Rows(*(vector[chosen] for vector in self))


class Parsed(NamedTuple):
    """The whole frames of a buffer.

    :param rows: the messages of the subscription
    :param others: every other frame, messages of other subscriptions included
    :param end: the first byte that belongs to no whole frame
    """

    rows: Rows
    others: list[Frame]
    end: int


def parse(buffer: bytearray | bytes, filled: int, sid: bytes) -> Parsed:
    """Find every whole frame.

    :param buffer: begins with a frame
    :param filled: how many bytes of it are in use
    :param sid: the subscription's id, made by :func:`new_sid`
    :raises WireError: it isn't NATS
    """
    pieces: list[Rows] = []
    others: list[Frame] = []
    position, batch = 0, 1
    while True:
        if filled - position >= _WORTHWHILE:
            rows, position = _parse_proved(buffer, filled, position, sid)
            pieces.append(rows)
        frames: list[tuple[int, ...]] = []
        frame = next_frame(buffer, position, filled)
        while frame is not None:
            position = frame.end
            if frame.sid == sid:
                frames.append(frame.offsets)
            else:
                others.append(frame)
            if len(frames) >= batch and filled - position >= _WORTHWHILE:
                break
            frame = next_frame(buffer, position, filled)
        pieces.append(_rows_of(frames))
        if frame is None:
            return Parsed(_joined(pieces), others, position)
        # Otherwise a payload that defeats every proof would have every byte searched again and again.
        batch *= 2


def _rows_of(frames: list[tuple[int, ...]]) -> Rows:
    return Rows(*np.array(frames, np.int64).reshape(-1, len(Rows._fields)).T)


def _joined(pieces: list[Rows]) -> Rows:
    pieces = [piece for piece in pieces if len(piece.end)] or pieces[:1]
    return pieces[0] if len(pieces) == 1 else Rows(*map(np.concatenate, zip(*pieces, strict=True)))


def _parse_proved(buffer: bytearray | bytes, filled: int, start: int, sid: bytes) -> tuple[Rows, int]:
    data = np.frombuffer(buffer, np.uint8, filled)
    marks, line_end = _with_line_ends(buffer, data, _find_ids(data, start, sid))
    if not len(marks):
        return _rows_of([]), start
    rows, good = _split_lines(data, start, marks, line_end)
    count = _first_true(~good)
    rows = rows.where(slice(_first_with_blank(data, rows.where(slice(count)))))
    return rows, int(rows.end[-1]) + 2 if len(rows.end) else start


def _first_true(mask: NDArray[np.bool_]) -> int:
    return int(np.argmax(mask)) if mask.any() else len(mask)


def _find_ids(data: Octets, start: int, sid: bytes) -> Integers:
    """Find the offsets of the id; there are fewer four-byte words to search than bytes."""
    skipped = start // _QUAD
    aligned = data[skipped * _QUAD : len(data) // _QUAD * _QUAD].view(np.uint32)
    offsets: Integers = (np.flatnonzero(aligned == _FOUR_MARKS) + skipped) * _QUAD
    offsets = offsets[: np.searchsorted(offsets, len(data) - 2 * _QUAD, "right")]
    # The word begins at the run of marks or up to three bytes later; the bytes after the word decide.
    following = four_byte_words(data)[offsets + _QUAD]
    more = np.zeros(len(offsets), np.int64)
    for count in range(1, _QUAD):
        few = (1 << 8 * count) - 1
        more += (following & np.uint32(few)) == _FOUR_MARKS & few
    marks: Integers = offsets + more - (_QUAD - 1)
    marks = marks[(marks >= start) & (marks <= len(data) - SID_LENGTH)]
    # Two words together cover the whole id.
    heads = eight_byte_words(data)[marks] == np.frombuffer(sid[:_WORD], np.uint64)[0]
    tails = eight_byte_words(data)[marks + (SID_LENGTH - _WORD)] == np.frombuffer(sid[-_WORD:], np.uint64)[0]
    ids: Integers = marks[heads & tails]
    return ids


def _with_line_ends(buffer: bytearray | bytes, data: Octets, marks: Integers) -> tuple[Integers, Integers]:
    """Find the byte before the next line feed after each mark; marks without a line feed are left out."""
    size = len(data)
    if not len(marks) or (first_feed := buffer.find(b"\n", int(marks[0]), size)) < 0:
        return marks[:0], marks[:0]
    width = first_feed - int(marks[0]) + 1
    # The last line may not have arrived as a whole; the others are compared without it.
    whole = int(np.searchsorted(marks, size - width, "right"))
    if whole < len(marks) and buffer.find(b"\n", int(marks[whole]), size) < 0:
        marks = marks[:whole]
    if (ends := _equal_line_ends(data, marks, width)) is not None:
        return marks, ends - 1
    width += _SLACK
    inside = int(np.searchsorted(marks, size - width, "right"))
    ends = marks[:0]
    if inside and inside * width * _SPARSE <= size:
        line_feeds = fixed_blocks(data, marks[:inside], width) == _LF
        distance = line_feeds.argmax(axis=1)
        ends = marks[:inside] + distance
        if not line_feeds[np.arange(inside), distance].all():
            ends = ends[:0]
    if len(ends) < len(marks):
        rest = marks[len(ends) :]
        line_feeds = np.flatnonzero(data[rest[0] :] == _LF) + rest[0]
        after = np.searchsorted(line_feeds, rest)
        ends = np.concatenate([ends, line_feeds[after[after < len(line_feeds)]]])
    return marks[: len(ends)], ends - 1


def _equal_line_ends(data: Octets, marks: Integers, width: int) -> Integers | None:
    """Return the line feed after each mark where each is at the same distance; ``None`` where that isn't so."""
    count = len(marks)
    if count * width > len(data) or int(marks[-1]) + width > len(data):
        return None
    line_feeds = fixed_blocks(data, marks, width) == _LF
    # Each line ends with one, and there is no other.
    same = bool(line_feeds[:, -1].all()) and np.count_nonzero(line_feeds) == count
    return marks + (width - 1) if same else None


def _split_lines(data: Octets, start: int, marks: Integers, line_end: Integers) -> tuple[Rows, NDArray[np.bool_]]:
    """Split the lines with marks, on the assumption that each begins where the message before it ends."""
    size = len(data)
    total, before = _numbers_before(data, line_end)
    header = line_end + 2
    end = header + total
    line = np.concatenate([np.array([start]), end[:-1] + 2])
    # After a line that isn't a message's, the computed offsets are arbitrary.
    offset = np.clip(line, 0, size - _WORD)
    kind = four_byte_words(data)[offset]
    good = (total >= 0) & (end + 2 <= size)
    with_header = kind == _HMSG
    subject, header_size = line + 4, np.zeros_like(total)
    if with_header.any():
        size_of_header, first = _numbers_before(data, before)
        header_size, before = np.where(with_header, size_of_header, 0), np.where(with_header, first, before)
        good &= (header_size >= 0) & (header_size <= total)
        good &= (kind == _MSG) | (with_header & (data[offset + 4] == _SPACE))
        subject += with_header
    else:
        good &= kind == _MSG
    sid_end = marks + SID_LENGTH
    good &= (subject < marks - 1) & (data[marks - 1] == _SPACE) & (data[line_end] == _CR)
    good &= (before >= sid_end) & (data[sid_end] == _SPACE)
    last = np.clip(end, 0, size - 2)
    good &= (data[last] == _CR) & (data[last + 1] == _LF)
    reply = np.where(before > sid_end, sid_end + 1, before)
    return Rows(subject, marks - 1, reply, before, header, header + header_size, end), good


def _numbers_before(data: Octets, ends: Integers) -> tuple[Integers, Integers]:
    """Read the number that ends at each offset (-1 where there is none), and the offset of the space before it."""
    first = data[max(0, int(ends[0]) - _LONGEST_NUMBER - 1) : int(ends[0])].tobytes()
    width = len(first) - first.rfind(b" ")
    # Mostly all numbers have the same length.
    if 1 < width <= _LONGEST_NUMBER + 1:
        numbers = fixed_blocks(data, np.maximum(ends - width, 0), width)
        if (numbers[:, 0] == _SPACE).all() and (same := decimal_values(numbers[:, 1:])) is not None:
            return same, ends - width
    values = np.zeros(len(ends), np.int64)
    offsets = ends - 1
    digits = data[offsets] - np.uint8(_ZERO)
    running = digits < _DIGITS
    good = running.copy()
    scale = 1
    for _ in range(_LONGEST_NUMBER):
        values += np.where(running, digits, 0).astype(np.int64) * scale
        offsets = offsets - running
        digits = data[offsets] - np.uint8(_ZERO)
        running &= digits < _DIGITS
        if not running.any():
            break
        scale *= 10
    good &= data[offsets] == _SPACE
    return np.where(good, values, -1), offsets


def _first_with_blank(data: Octets, rows: Rows) -> int:
    """Find the first row whose subject has a space or a line end in it: its mark isn't in the position of an id."""
    lengths = rows.subject_end - rows.subject
    if not len(lengths):
        return 0
    if (lengths == lengths[0]).all():
        subjects = fixed_blocks(data, rows.subject, int(lengths[0]))
        return len(subjects) if np.min(subjects) > _SPACE else _first_true((subjects <= _SPACE).any(axis=1))
    content, offsets = content_and_offsets(gather_slices(data, rows.subject, rows.subject_end))
    blanks = np.flatnonzero(content <= _SPACE)
    return int(np.searchsorted(offsets, blanks[0], "right")) - 1 if len(blanks) else len(lengths)
