"""Many messages at once: found by their subscription's unguessable id, and proved to be all there is.

The id marks the first line of every message; sizes are read from those lines for all messages together. That each
message ends where the next one begins proves that nothing lies between them and that no mark was a payload's: the first
message begins where a frame is known to begin, so by induction all do. What isn't proved is read frame by frame.
"""

from __future__ import annotations

import secrets
import string
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from airflow_provider_jetstream.spark.frames import Frame, next_frame
from airflow_provider_jetstream.spark.gathering import contents, gathered

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]
    Octets = NDArray[np.uint8]

_WORD = 8
# DEL: rare in text, so that few candidates are looked at.
_MARK = b"\x7f"
_ALPHABET = string.ascii_letters + string.digits
_LONGEST_NUMBER = 10
_DIGITS = 10
_SPACE, _CR, _LF, _ZERO, _H = b" \r\n0H"
_MSG = int.from_bytes(b"MSG ", "little")
_HMSG = int.from_bytes(b"HMSG", "little")
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


def new_sid() -> bytes:
    """Make an id for a subscription that no payload can hold by chance or by guess.

    :return: eight bytes
    """
    return _MARK + "".join(secrets.choice(_ALPHABET) for _ in range(_WORD - 1)).encode()


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
            rows, at = _proved(np.frombuffer(buffer, np.uint8, filled), at, sid)
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


def _proved(data: Octets, start: int, sid: bytes) -> tuple[Rows, int]:
    size = len(data)
    marks = np.flatnonzero(data[start:] == _MARK[0]) + start
    words = np.ndarray((size - _WORD + 1,), np.uint64, data, strides=(1,))
    marks = marks[marks <= size - _WORD]
    marks = marks[words[marks] == np.frombuffer(sid, np.uint64)[0]]
    line_feeds = np.flatnonzero(data[start:] == _LF) + start
    at = np.searchsorted(line_feeds, marks)
    marks = marks[at < len(line_feeds)]
    at = at[: len(marks)]
    if not len(marks):
        return _from_tuples([]), start
    line_end = line_feeds[at] - 1
    line = np.where(at > 0, line_feeds[at - 1] + 1, start)
    rows, good = _rows(data, marks, line, line_end)
    good[0] &= line[0] == start
    good[1:] &= line[1:] == rows.end[:-1] + 2
    count = _first_with_space(data, rows, len(good) if good.all() else int(np.argmin(good)))
    rows = rows.where(slice(count))
    return rows, int(rows.end[-1]) + 2 if count else start


def _rows(data: Octets, marks: Integers, line: Integers, line_end: Integers) -> tuple[Rows, NDArray[np.bool_]]:
    quads = np.ndarray((len(data) - 3,), np.uint32, data, strides=(1,))
    # Every line before a mark is long enough for four bytes to follow its start: the mark alone has eight.
    kind = quads[line]
    with_header = kind == _HMSG
    total, before = _numbers(data, line_end)
    if with_header.any():
        header_size, first = _numbers(data, before)
        header_size, before = np.where(with_header, header_size, 0), np.where(with_header, first, before)
    else:
        header_size = np.zeros_like(total)
    sid_end = marks + _WORD
    subject = line + np.where(with_header, 5, 4)
    header = line_end + 2
    end = header + total
    good = (total >= 0) & (header_size >= 0) & (header_size <= total) & (end + 2 <= len(data))
    good &= (kind == _MSG) | (with_header & (data[line + 4] == _SPACE))
    good &= (subject < marks) & (data[marks - 1] == _SPACE) & (data[line_end] == _CR)
    good &= (before >= sid_end) & (data[np.minimum(sid_end, len(data) - 1)] == _SPACE)
    last = np.minimum(end, len(data) - 2)
    good &= (data[last] == _CR) & (data[last + 1] == _LF)
    reply = np.where(before > sid_end, sid_end + 1, before)
    return Rows(subject, marks - 1, reply, before, header, header + header_size, end), good


def _numbers(data: Octets, ends: Integers) -> tuple[Integers, Integers]:
    """Read the number that ends before each place: its value, or -1, and where the space before it is."""
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


def _first_with_space(buffer: Octets, rows: Rows, count: int) -> int:
    """Find the first row whose subject holds a space: its mark isn't where an id belongs."""
    subjects = gathered(buffer, rows.subject[:count], rows.subject_end[:count])
    content, offsets = contents(subjects)
    spaces = np.flatnonzero(content == _SPACE)
    return int(np.searchsorted(offsets, spaces[0], "right")) - 1 if len(spaces) else count
