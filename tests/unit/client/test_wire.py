"""Bytes become frames and frames bytes, however they are cut and whatever a server, a publisher or a client sends."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.client.wire import (
    AnswerForm,
    FrameReader,
    SentFrameReader,
    Unfinished,
    encode_message,
    encode_subject,
    next_frame,
)
from airflow_provider_jetstream.jetstream.errors import WireError
from airflow_provider_jetstream.jetstream.limits import MESSAGE, PROTOCOL_LINE

_HEADERS = b"NATS/1.0\r\nA: 1\r\n\r\n"
_NAMES = st.binary(min_size=1, max_size=6).filter(lambda name: not set(name) & set(b" \t\r\n"))
_NOT_FRAMES = [
    b"MSG a 1\r\n",
    b"MSG a 1 b c 2\r\nok\r\n",
    b"MSG a 1 -2\r\nok\r\n",
    b"MSG a\t1 2\r\nok\r\n",
    b"MSG a 1 2\r\nokay\r\n",
    b"MSG a 1 %d\r\n" % (MESSAGE + 1),
    b"MSG a 1 9999999999\r\n",
    b"MSG a 1 " + b"9" * 5_000 + b"\r\n",
    b"HMSG a 1 2\r\nok\r\n",
    b"HMSG a 1 3 2\r\nok\r\n",
    b"MSGa 1 2\r\nok\r\n",
    b"msg a 1 2\r\nok\r\n",
    b"HTTP/1.1 400 Bad Request\r\n",
    b"\r\n",
    b"x" * (PROTOCOL_LINE + 1),
    b"MSG " + b"x" * PROTOCOL_LINE,
]


class _Received:
    """What a reader hands over."""

    def __init__(self) -> None:
        self.frames: list[tuple[bytes, ...]] = []

    def on_message(self, sid: bytes, subject: bytes, reply: bytes, headers: bytes | None, body: bytes) -> None:
        self.frames.append((sid, subject, reply, headers or b"", body))

    def on_control(self, op: bytes, line: bytes) -> None:
        self.frames.append((op, line))

    def read(self, reader: FrameReader, data: bytes, size: int = 1 << 30) -> None:
        for start in range(0, len(data), size):
            reader.feed(data[start : start + size])
            while reader.read(self.on_message, self.on_control, 2):
                pass


def reference(data: bytes) -> list[tuple[bytes, ...]]:
    """Parse whole frames as the protocol's description reads: split lines, and count bytes."""
    frames: list[tuple[bytes, ...]] = []
    while data:
        line, _, rest = data.partition(b"\r\n")
        op, *fields = line.split(b" ")
        if op not in (b"MSG", b"HMSG"):
            frames.append((op, line))
            data = rest
            continue
        size = int(fields.pop())
        header_size = int(fields.pop()) if op == b"HMSG" else 0
        subject, sid, *reply = fields
        frames.append((sid, subject, b"".join(reply), rest[:header_size], rest[header_size:size]))
        data = rest[size + 2 :]
    return frames


@st.composite
def _server_frames(draw: st.DrawFn) -> bytes:
    if draw(st.booleans()):
        return draw(st.sampled_from([b"PING", b"PONG", b"+OK", b"-ERR 'MSG a 1 2'", b'INFO {"a":"b c"}'])) + b"\r\n"
    subject, sid, reply = (
        draw(_NAMES),
        draw(_NAMES),
        draw(st.one_of(st.just(b""), _NAMES.map(lambda name: name + b" "))),
    )
    # The server leaves two spaces where an answer of its own has no reply subject.
    gap = b" " if not reply and draw(st.booleans()) else b""
    headers = draw(st.sampled_from([b"", _HEADERS]))
    body = draw(st.one_of(st.binary(max_size=30), st.sampled_from([b"\r\n", b"MSG a 1 2\r\nok\r\n", b"x" * 70_000])))
    start = b"%b %b %b%b" % (subject, sid, gap, reply)
    if headers:
        return b"HMSG %b%d %d\r\n%b%b\r\n" % (start, len(headers), len(headers + body), headers, body)
    return b"MSG %b%d\r\n%b\r\n" % (start, len(body), body)


@given(st.lists(_server_frames(), max_size=8), st.lists(st.integers(0, 400), max_size=8))
def test_frames_are_the_same_wherever_the_bytes_are_cut(frames: list[bytes], cuts: list[int]) -> None:
    data = b"".join(frames)
    received, reader = _Received(), FrameReader()
    places = [0, *sorted(cuts), len(data)]
    for start, end in pairwise(places):
        received.read(reader, data[start:end])
    assert received.frames == reference(data)
    position, ops = 0, []
    while frame := next_frame(data, position, len(data)):
        position = frame.end
        ops.append(frame.sid or frame.op)
    assert (position, ops) == (len(data), [parts[0] for parts in received.frames])
    messages = [parts for parts in received.frames if len(parts) > 2]
    assert (reader.messages, reader.size) == (len(messages), sum(len(parts[-1]) for parts in messages))


@given(st.lists(st.integers(1, 60), max_size=12))
def test_what_a_form_takes_and_what_it_leaves_come_in_order_wherever_the_bytes_are_cut(sizes: list[int]) -> None:
    data = b"".join(
        b"MSG i.%d 1 %d\r\n%b\r\n" % (number, len(body), body)
        for number, body in enumerate([b"one", b"two", b"a\r\nb", b"four", b"", b"MSG i.9 1 0\r\n\r\n", b"seven"])
    )
    taken: list[tuple[int, bytes]] = []
    form = AnswerForm(b"i.", lambda numbers, bodies: taken.extend(zip(numbers, bodies, strict=True)))
    form.bind(1)
    reader, received = FrameReader(), _Received()
    reader.forms[b"1"] = form
    position = 0
    for size in [*sizes, len(data)]:
        received.read(reader, data[position : position + size])
        position += size
    by_itself = [(int(subject[2:]), body) for _, subject, _, _, body in received.frames]
    assert sorted(taken + by_itself) == [(int(subject[2:]), body) for _, subject, _, _, body in reference(data)]
    assert reader.messages == 7


@pytest.mark.parametrize("data", _NOT_FRAMES)
@pytest.mark.parametrize("size", [1 << 30, 1_000])
def test_what_no_server_sends_is_refused_before_it_is_waited_for(data: bytes, size: int) -> None:
    with pytest.raises(WireError):
        next_frame(data, 0, len(data))
    received, reader = _Received(), FrameReader()
    with pytest.raises(WireError):
        received.read(reader, data, size)
    assert received.frames == []


@given(st.binary(max_size=200), st.integers(1, 50))
def test_anything_ends_with_frames_or_an_error_of_the_tree(data: bytes, size: int) -> None:
    received, reader = _Received(), FrameReader()
    with suppress(WireError):
        received.read(reader, b"PING\r\n" + data, size)
    assert received.frames[:1] in ([], [(b"PING", b"PING")])


@pytest.mark.parametrize("begun", [b"MSG " + b"x" * 90, b"INFO " + b"x" * 90, b"MSG a 1 200\r\n" + b"x" * 90], ids=str)
@pytest.mark.parametrize("before", [b"", b"PING\r\n"])
def test_a_frame_that_comes_in_pieces_is_read_once(before: bytes, begun: bytes) -> None:
    # A long line in a thousand pieces would be searched a thousand times otherwise.
    unfinished, data = Unfinished(), before + begun
    if before:
        assert unfinished.next_frame(data, 0, len(data))
    assert unfinished.next_frame(data, len(before), len(data)) is None
    unfinished.drop(len(before))
    changed = begun[:50] + b"\r\n" + begun[52:] + b"x"
    assert unfinished.next_frame(changed, 0, len(changed)) is None


def test_what_is_encoded_is_read_as_it_was() -> None:
    sent = [("a", b"", b"", b""), ("b.c", b"body", _HEADERS, b"r"), ("d", b"\r\nPUB x 1\r\n", b"", b"")]
    data = b"".join(encode_message(encode_subject(subject), *rest) for subject, *rest in sent)
    assert [(frame.subject, frame.payload) for frame in SentFrameReader().feed(data)] == [
        (subject, body) for subject, body, _, _ in sent
    ]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_frames_of_a_client_are_divided_wherever_they_are_cut(size: int) -> None:
    frames = [
        b'CONNECT {"verbose":false}\r\n',
        b"PUB a.b 5\r\nPUB \r\r\n",
        b"pub  a.b\treply 0\r\n\r\n",
        b"HPUB c reply 14 16\r\nNATS/1.0\r\nA:\r\nhi\r\n",
        b"HPUB c 12 12\r\nNATS/1.0\r\n\r\n\r\n",
        b"PING\r\n",
    ]
    data = b"".join(frames)
    reader = SentFrameReader()
    found = [frame for start in range(0, len(data), size) for frame in reader.feed(data[start : start + size])]
    assert [frame.data for frame in found] == frames
    assert [(frame.subject, frame.payload) for frame in found] == [
        ("", b""),
        ("a.b", b"PUB \r"),
        ("a.b", b""),
        ("c", b"hi"),
        ("c", b""),
        ("", b""),
    ]


@pytest.mark.parametrize("subject", ["", "a b", "a\tb", "a\r\nPUB b 0", "x" * 3_501])
def test_a_subject_that_would_be_another_command_is_refused(subject: str) -> None:
    with pytest.raises(WireError, match="expected a subject of at most 3500 bytes"):
        encode_subject(subject)


def test_a_line_in_many_pieces_is_put_together_once() -> None:
    reader, received = FrameReader(), _Received()
    received.read(reader, b"PING\r\nINFO ", 1)
    joined = reader._data  # noqa: SLF001
    received.read(reader, b"x" * 5_000, 1)
    assert reader._data is joined  # noqa: SLF001
    received.read(reader, b"\r\n", 1)
    assert received.frames == [(b"PING", b"PING"), (b"INFO", b"INFO " + b"x" * 5_000)]
