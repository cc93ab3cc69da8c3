"""Bulk parser."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nats.protocol.parser import Parser

from airflow_provider_jetstream.jetstream.client.wire import next_frame
from airflow_provider_jetstream.jetstream.errors import WireError
from airflow_provider_jetstream.spark.source.bulk_parser import parse
from testbed import seams

_MARKS = b"\x7f" * 7
_SID = _MARKS + b"Abcdefg"


class _SentMessage(NamedTuple):
    subject: bytes
    reply: bytes
    header: bytes | None
    body: bytes
    sid: bytes = _SID

    def wire(self, sid: bytes = b"") -> bytes:
        reply = self.reply + b" " if self.reply else b""
        start = b"%b %b %b" % (self.subject, sid or self.sid, reply)
        if self.header is None:
            return b"MSG %b%d\r\n%b\r\n" % (start, len(self.body), self.body)
        sizes = b"%d %d" % (len(self.header), len(self.header) + len(self.body))
        return b"HMSG %b%b\r\n%b%b\r\n" % (start, sizes, self.header, self.body)


# Content that misleads a parser that searches marks and line ends: both are in bodies, headers and subjects.
_MISLEADING = st.sampled_from(
    [
        b"\r\n",
        b"\n",
        b"\r",
        _SID,
        b" " + _SID + b" 5\r\n",
        b"MSG a.b " + _SID + b" 3\r\nabc\r\n",
        b"\r\nHMSG a.b " + _SID + b" r 12 14\r\nNATS/1.0\r\n\r\nab\r\n",
        b"PING\r\n",
        b"MSG a.b 9 " + _SID + b" 3\r\nabc\r\n",
        b"MSG a.b 9 3\r\nabc\r\nMSG a.b " + _SID + b" 3\r\nabc\r\n",
        b"\x7f",
        b"\x7f" * 4,
        _MARKS + _SID,
        _SID[:-1],
        b" ",
    ]
)
_BODY = st.lists(st.one_of(st.binary(max_size=12), _MISLEADING), max_size=5).map(b"".join)
_TOKEN = st.one_of(
    st.text("abcXYZ019-_$", min_size=1, max_size=8).map(str.encode), st.just(_SID), st.just("é".encode())
)
_SUBJECT = st.lists(_TOKEN, min_size=1, max_size=4).map(b".".join)
_V1 = b"$JS.ACK.orders.c1.1.%d.%d.1795273816157554782.%d"
_V2 = b"$JS.ACK.hub.ACCHASH.orders.c1.1.%d.%d.1795273816157554782.%d.Ra9dOm"
_NUMBERS = st.tuples(*[st.integers(0, 10**12)] * 3)
_REPLY = st.one_of(
    st.just(b""),
    _SUBJECT,
    _NUMBERS.map(lambda numbers: _V1 % numbers),
    _NUMBERS.map(lambda numbers: _V2 % numbers),
)
_HEADER = st.one_of(
    st.none(),
    st.just(b"NATS/1.0\r\n\r\n"),
    st.just(b"NATS/1.0 404 No Messages\r\n\r\n"),
    _BODY.map(lambda value: b"NATS/1.0\r\nKey: " + value + b"\r\n\r\n"),
)
_MESSAGE = st.builds(_SentMessage, _SUBJECT, _REPLY, _HEADER, _BODY, st.just(_SID))
_CONTROL = st.sampled_from([b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b"-ERR 'Slow Consumer'\r\n"])
_FRAMES = st.lists(st.one_of(_MESSAGE, _MESSAGE, _MESSAGE, _CONTROL), max_size=25)
_FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=[0, 64], ids=["always in bulk", "in bulk from 64 bytes"])
def threshold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    # With the real threshold, these small buffers would all be parsed frame by frame.
    monkeypatch.setattr(seams.BULK_PARSER_WORTHWHILE, max(request.param, 16))
    return int(request.param)


def _parsed_by_frame(data: bytes) -> tuple[list[tuple[int, ...]], list[bytes], int]:
    rows: list[tuple[int, ...]] = []
    others: list[bytes] = []
    position = 0
    while frame := next_frame(data, position, len(data)):
        position = frame.end
        if frame.sid == _SID:
            rows.append(frame.offsets)
        else:
            others.append(frame.line)
    return rows, others, position


def _parsed_in_bulk(data: bytes) -> tuple[list[tuple[int, ...]], list[bytes], int]:
    parsed = parse(data, len(data), _SID)
    rows = list(zip(*(column.tolist() for column in parsed.rows), strict=True))
    return rows, [frame.line for frame in parsed.others], parsed.end


def _contents(data: bytes, offsets: tuple[int, ...]) -> tuple[bytes, bytes, bytes, bytes]:
    subject, subject_end, reply, reply_end, header, body, end = offsets
    return data[subject:subject_end], data[reply:reply_end], data[header:body], data[body:end]


@_FUZZ
@given(frames=_FRAMES, cut=st.integers(0, 40))
@pytest.mark.usefixtures("threshold")
def test_the_bulk_parser_equals_the_frame_parser_wherever_the_buffer_ends(
    frames: list[_SentMessage | bytes], cut: int
) -> None:
    data = b"".join(frame if isinstance(frame, bytes) else frame.wire() for frame in frames)
    data = data[: max(0, len(data) - cut)]
    assert _parsed_in_bulk(data) == _parsed_by_frame(data)


@_FUZZ
@given(frames=_FRAMES, sizes=st.lists(st.integers(1, 90), min_size=1, max_size=12))
@pytest.mark.usefixtures("threshold")
def test_every_message_is_parsed_once_whatever_the_chunks_are(
    frames: list[_SentMessage | bytes], sizes: list[int]
) -> None:
    data = b"".join(frame if isinstance(frame, bytes) else frame.wire() for frame in frames)
    messages: list[tuple[bytes, ...]] = []
    others: list[bytes] = []
    held, position, chunk = b"", 0, 0
    while position < len(data):
        size = sizes[chunk % len(sizes)]
        held, position, chunk = held + data[position : position + size], position + size, chunk + 1
        parsed = parse(held, len(held), _SID)
        rows = zip(*(column.tolist() for column in parsed.rows), strict=True)
        messages += [_contents(held, offsets) for offsets in rows]
        others += [frame.line for frame in parsed.others]
        held = held[parsed.end :]
    assert held == b""
    sent = [frame for frame in frames if isinstance(frame, _SentMessage)]
    assert messages == [(frame.subject, frame.reply, frame.header or b"", frame.body) for frame in sent]
    assert others == [frame.removesuffix(b"\r\n") for frame in frames if isinstance(frame, bytes)]


@pytest.mark.parametrize(
    "body",
    [
        b"\x7f" * 5000,
        (b"\x7f" * 7 + b"x") * 700,
        _SID * 400,
        b"\n" * 3000,
        b"MSG a.b %b 0\r\n\r\n" % _SID * 200,
        b"MSG a.b 9 %b 0\r\n\r\n" % _SID * 200,
    ],
    ids=["only marks", "runs of marks", "ids", "line feeds", "messages", "replies"],
)
@pytest.mark.parametrize("cut", [0, 1, 3000])
def test_misleading_bodies_are_parsed_whole(body: bytes, cut: int) -> None:
    messages = [_SentMessage(b"a.b", b"", None, body[start:]) for start in range(6)] + [
        _SentMessage(b"c", b"d.%d" % 10**9, None, b"x")
    ]
    data = b"".join(message.wire() for message in [*messages, messages[0]])
    data = data[: len(data) - cut]
    assert _parsed_in_bulk(data) == _parsed_by_frame(data)


class _Client:
    """The methods that nats-py's own parser calls."""

    def __init__(self) -> None:
        self.messages: list[tuple[bytes, bytes, bytes, bytes]] = []
        self.pings = 0

    async def _process_msg(self, _sid: int, subject: bytes, reply: bytes, data: bytes, header: bytes | None) -> None:
        self.messages.append((bytes(subject), bytes(reply), bytes(header or b""), bytes(data)))

    async def _process_ping(self) -> None:
        self.pings += 1

    async def _process_pong(self) -> None:
        pass

    async def _process_err(self, _message: str) -> None:
        pass


@given(frames=st.lists(st.one_of(_MESSAGE, st.just(b"PING\r\n")), max_size=25))
def test_the_frame_parser_equals_the_parser_of_the_client_library(frames: list[_SentMessage | bytes]) -> None:
    # The library expects numbers as ids.
    for_library = b"".join(frame if isinstance(frame, bytes) else frame.wire(b"7") for frame in frames)
    data = b"".join(frame if isinstance(frame, bytes) else frame.wire() for frame in frames)
    client: Any = _Client()
    asyncio.run(Parser(client).parse(for_library))
    rows, others, end = _parsed_by_frame(data)
    assert end == len(data)
    assert [_contents(data, offsets) for offsets in rows] == client.messages
    assert len(others) == client.pings


@pytest.mark.parametrize("widths", [(100,), (5, 3000), (1, 20, 300)], ids=str)
def test_most_of_a_real_buffer_is_parsed_in_bulk(monkeypatch: pytest.MonkeyPatch, widths: tuple[int, ...]) -> None:
    frames = 0

    def counting(*arguments: Any) -> Any:
        nonlocal frames
        frames += 1
        return next_frame(*arguments)

    monkeypatch.setattr(seams.BULK_PARSER_NEXT_FRAME, counting)
    messages = [
        _SentMessage(b"a.b", b"$JS.ACK.o.c.1.%d.%d.1.1" % (number, number), None, b"x" * widths[number % len(widths)])
        for number in range(2000)
    ]
    data = b"".join(message.wire() for message in messages)
    middle = len(data) // 2 // len(messages[0].wire()) * len(messages[0].wire())
    middle = data.index(b"MSG a.b", middle)
    noisy = data[:middle] + b"PING\r\n" + data[middle:] + data[:50]
    rows, others, end = _parsed_in_bulk(noisy)
    assert (len(rows), others, end) == (2000, [b"PING"], len(noisy) - 50)
    assert frames < 60


@pytest.mark.parametrize(
    "garbage",
    [
        b"HELLO\r\n",
        b"MSG a\r\n",
        b"MSG a b c d 5\r\nhello\r\n",
        b"MSG a b x\r\n",
        b"HMSG a b 9 5\r\nhello\r\n",
        b"MSG a b 5\r\nhello__",
        b"x" * (2 << 20),
    ],
)
def test_bytes_that_are_not_nats_are_refused(garbage: bytes) -> None:
    with pytest.raises(WireError, match="expected"):
        parse(garbage, len(garbage), _SID)
