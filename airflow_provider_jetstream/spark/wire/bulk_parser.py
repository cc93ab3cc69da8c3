"""Many messages at once: found by their subscription's unguessable id, and proved to be all there is.

The id marks the first line of every message; sizes are read from those lines for all messages together. Where each
message ends, the line of the next has to begin, with the id in the place of an id: this proves that nothing lies
between them and that no mark was a payload's. The first message begins where a frame is known to begin, so by induction
all do. What isn't proved is read frame by frame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from airflow_provider_jetstream.jetstream.client.blocking.parser import Frame, next_frame
from airflow_provider_jetstream.jetstream.client.blocking.subscription_id import MARKS, SID_LENGTH
from airflow_provider_jetstream.spark.wire.arrow_buffers import contents, gathered
from airflow_provider_jetstream.spark.wire.byte_blocks import blocks, eights, fours, value

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
# Where lines are at most this part of all bytes, they alone are looked through for their ends.
_SPARSE = 4
# By how much a line may be longer than the first one before lines are searched in a slower way.
_SLACK = 16
# Below this many bytes, setting up the vectors costs more than it saves.
_WORTHWHILE = 2048


class Rows(NamedTuple):
    """Where the parts of messages lie in a buffer, a vector for each; see :class:`~.frames.Frame`."""

    subject: Integers
    subject_end: Integers
    reply: Integers
    reply_end: Integers
    header: Integers
    body: Integers
    end: Integers

    def where(self, chosen: NDArray[np.bool_] | slice) -> Rows:
        """Choose messages.

        :param chosen: a mask, or a slice
        :return: those
        """
        return Rows(*(part[chosen] for part in self))


class Parsed(NamedTuple):
    """What a buffer holds.

    :param rows: the messages of the subscription
    :param others: every other frame, with messages of other subscriptions
    :param end: the first byte that belongs to no whole frame
    """

    rows: Rows
    others: list[Frame]
    end: int


def parse(buffer: bytearray | bytes, filled: int, sid: bytes) -> Parsed:
    """Find every whole frame.

    :param buffer: begins with a frame
    :param filled: how much of it is in use
    :param sid: made by :func:`new_sid`
    :return: the frames
    :raises WireError: it isn't NATS
    """
    pieces: list[Rows] = []
    others: list[Frame] = []
    at, patience = 0, 1
    while True:
        if filled - at >= _WORTHWHILE:
            rows, at = _proved(buffer, filled, at, sid)
            pieces.append(rows)
        walked: list[tuple[int, ...]] = []
        frame = next_frame(buffer, at, filled)
        while frame is not None:
            at = frame.end
            if frame.sid == sid:
                walked.append(frame.parts)
            else:
                others.append(frame)
            if len(walked) >= patience and filled - at >= _WORTHWHILE:
                break
            frame = next_frame(buffer, at, filled)
        pieces.append(_from_tuples(walked))
        if frame is None:
            return Parsed(_joined(pieces), others, at)
        # Whoever could make every proof fail would make every byte be looked at again and again.
        patience *= 2


def _from_tuples(parts: list[tuple[int, ...]]) -> Rows:
    return Rows(*np.array(parts, np.int64).reshape(-1, len(Rows._fields)).T)


def _joined(pieces: list[Rows]) -> Rows:
    pieces = [piece for piece in pieces if len(piece.end)] or pieces[:1]
    return pieces[0] if len(pieces) == 1 else Rows(*map(np.concatenate, zip(*pieces, strict=True)))


def _proved(buffer: bytearray | bytes, filled: int, start: int, sid: bytes) -> tuple[Rows, int]:
    data = np.frombuffer(buffer, np.uint8, filled)
    marks, line_end = _with_line_ends(buffer, data, _marks(data, start, sid))
    if not len(marks):
        return _from_tuples([]), start
    rows, good = _rows(data, start, marks, line_end)
    count = _first(~good)
    rows = rows.where(slice(_first_with_blank(data, rows.where(slice(count)))))
    return rows, int(rows.end[-1]) + 2 if len(rows.end) else start


def _first(bad: NDArray[np.bool_]) -> int:
    return int(np.argmax(bad)) if bad.any() else len(bad)


def _marks(data: Octets, start: int, sid: bytes) -> Integers:
    """Find where the id is: words of four are fewer to look through than bytes."""
    skipped = start // _QUAD
    aligned = data[skipped * _QUAD : len(data) // _QUAD * _QUAD].view(np.uint32)
    places: Integers = (np.flatnonzero(aligned == _FOUR_MARKS) + skipped) * _QUAD
    places = places[: np.searchsorted(places, len(data) - 2 * _QUAD, "right")]
    # The word begins with the run of marks, or up to three bytes after it: what follows the word tells.
    following = fours(data)[places + _QUAD]
    more = np.zeros(len(places), np.int64)
    for count in range(1, _QUAD):
        few = (1 << 8 * count) - 1
        more += (following & np.uint32(few)) == _FOUR_MARKS & few
    marks: Integers = places + more - (_QUAD - 1)
    marks = marks[(marks >= start) & (marks <= len(data) - SID_LENGTH)]
    # Both words together are the whole id.
    heads = eights(data)[marks] == np.frombuffer(sid[:_WORD], np.uint64)[0]
    tails = eights(data)[marks + (SID_LENGTH - _WORD)] == np.frombuffer(sid[-_WORD:], np.uint64)[0]
    found: Integers = marks[heads & tails]
    return found


def _with_line_ends(buffer: bytearray | bytes, data: Octets, marks: Integers) -> tuple[Integers, Integers]:
    """Find what comes before the next line feed after each mark; marks without one are left out."""
    size = len(data)
    if not len(marks) or (found := buffer.find(b"\n", int(marks[0]), size)) < 0:
        return marks[:0], marks[:0]
    width = found - int(marks[0]) + _SLACK
    inside = int(np.searchsorted(marks, size - width, "right"))
    ends = marks[:0]
    if inside and inside * width * _SPARSE <= size:
        feeds = blocks(data, marks[:inside], width) == _LF
        at = feeds.argmax(axis=1)
        ends = marks[:inside] + at
        if not feeds[np.arange(inside), at].all():
            ends = ends[:0]
    if len(ends) < len(marks):
        rest = marks[len(ends) :]
        line_feeds = np.flatnonzero(data[rest[0] :] == _LF) + rest[0]
        after = np.searchsorted(line_feeds, rest)
        ends = np.concatenate([ends, line_feeds[after[after < len(line_feeds)]]])
    return marks[: len(ends)], ends - 1


def _rows(data: Octets, start: int, marks: Integers, line_end: Integers) -> tuple[Rows, NDArray[np.bool_]]:
    """Take the lines with marks apart, on the assumption that each begins where the message before it ends."""
    size = len(data)
    total, before = _numbers(data, line_end)
    header = line_end + 2
    end = header + total
    line = np.concatenate([np.array([start]), end[:-1] + 2])
    # After what isn't a message's line, anything may seem to follow.
    place = np.clip(line, 0, size - _WORD)
    kind = fours(data)[place]
    good = (total >= 0) & (end + 2 <= size)
    with_header = kind == _HMSG
    subject, header_size = line + 4, np.zeros_like(total)
    if with_header.any():
        size_of_header, first = _numbers(data, before)
        header_size, before = np.where(with_header, size_of_header, 0), np.where(with_header, first, before)
        good &= (header_size >= 0) & (header_size <= total)
        good &= (kind == _MSG) | (with_header & (data[place + 4] == _SPACE))
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


def _numbers(data: Octets, ends: Integers) -> tuple[Integers, Integers]:
    """Read the number that ends before each place: its value, or -1, and where the space before it is."""
    first = data[max(0, int(ends[0]) - _LONGEST_NUMBER - 1) : int(ends[0])].tobytes()
    width = len(first) - first.rfind(b" ")
    # Mostly all have as many digits.
    if 1 < width <= _LONGEST_NUMBER + 1:
        found = blocks(data, np.maximum(ends - width, 0), width)
        if (found[:, 0] == _SPACE).all() and (read := value(found[:, 1:])) is not None:
            return read, ends - width
    values = np.zeros(len(ends), np.int64)
    at = ends - 1
    digits = data[at] - np.uint8(_ZERO)
    running = digits < _DIGITS
    good = running.copy()
    scale = 1
    for _ in range(_LONGEST_NUMBER):
        values += np.where(running, digits, 0).astype(np.int64) * scale
        at = at - running
        digits = data[at] - np.uint8(_ZERO)
        running &= digits < _DIGITS
        if not running.any():
            break
        scale *= 10
    good &= data[at] == _SPACE
    return np.where(good, values, -1), at


def _first_with_blank(data: Octets, rows: Rows) -> int:
    """Find the first row whose subject holds a space or a line's end: its mark isn't where an id belongs."""
    lengths = rows.subject_end - rows.subject
    if not len(lengths):
        return 0
    if (lengths == lengths[0]).all():
        found = blocks(data, rows.subject, int(lengths[0]))
        return len(found) if np.min(found) > _SPACE else _first((found <= _SPACE).any(axis=1))
    content, offsets = contents(gathered(data, rows.subject, rows.subject_end))
    blanks = np.flatnonzero(content <= _SPACE)
    return int(np.searchsorted(offsets, blanks[0], "right")) - 1 if len(blanks) else len(lengths)
