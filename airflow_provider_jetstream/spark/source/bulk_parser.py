"""Reads many messages of one subscription at once from a receive buffer: places, headers, sequences, times.

The subscription's unguessable id marks the first line of every message; sizes are read from those lines for all
messages together. Where each message ends, the line of the next one must begin, with the id in the position of an id:
this proves that nothing lies between the messages and that no mark was part of a payload. The first message begins
where a frame is known to begin, so by induction every message does. What isn't proved is parsed frame by frame, by the
core.

Protocol: "NATS Client Protocol" and "JetStream wire API reference" in the NATS documentation; ADR-15 for reply subjects
with a domain; ADR-31 for direct gets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_jetstream.jetstream.client.wire import MARKS, SID_LENGTH, Frame, next_frame
from airflow_provider_jetstream.jetstream.errors import WireError
from airflow_provider_jetstream.spark.source.arrow_buffers import (
    TIMESTAMP,
    as_integers,
    as_text,
    content_and_offsets,
    decimal_values,
    eight_byte_words,
    fixed_blocks,
    four_byte_words,
    gather_slices,
    offsets_column,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]
    Octets = NDArray[np.uint8]


_WORD, _QUAD = 8, 4
_FOUR_MARKS = int.from_bytes(MARKS[:_QUAD], "little")
_LONGEST_NUMBER = 10
_DIGITS = 10
_LF, _CR, _COLON, _SPACE, _TAB, _ZERO = b"\n\r: \t0"
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
    """Read headers where every message has the same ones, with values of equal lengths; ``None`` where they differ.

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
    """Make an array in which all rows have elements of the same lengths."""
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


_DOT = ord(".")
# $JS.ACK.<stream>.<consumer>.<deliveries>.<stream sequence>.<consumer sequence>.<time>.<pending>
_DOTS = 8
_BEFORE_SEQUENCE = 4
# $JS.ACK.<domain>.<account>.<stream>.… and, with some servers, one more token at the end
_DOTS_WITH_DOMAIN = 10

# The headers that the server adds after the publisher's own, in this order, before the empty line.
_NAMES = (
    b"Nats-Stream: ",
    b"Nats-Subject: ",
    b"Nats-Sequence: ",
    b"Nats-Time-Stamp: ",
    b"Nats-Num-Pending: ",
    b"Nats-Last-Sequence: ",
)


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
    replies = gather_slices(buffer, starts, ends)
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
    content, bounds = content_and_offsets(gather_slices(buffer, starts, ends))
    line_feeds = np.flatnonzero(content == _LF)
    # The line feed of the empty line at the end of each block.
    last = np.searchsorted(line_feeds, bounds[1:] - 1)
    # The line feed before each added line, and the one that ends the last of them.
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
    text = gather_slices(buffer, metadata.time, metadata.time_end + 1).cast(pa.string())
    return text.cast(pa.timestamp("ns", "UTC")).cast(TIMESTAMP, safe=False)
