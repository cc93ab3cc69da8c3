"""Direct get headers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.errors import WireError
from airflow_provider_jetstream.spark.source.arrow_buffers import gather_slices
from airflow_provider_jetstream.spark.source.bulk_parser import DirectGetMetadata, parse_metadata, parse_times

_FIRST = b"NATS/1.0\r\n"
_MORNING = datetime(2026, 11, 21, 15, 10, 11, tzinfo=UTC)
_EPOCH = datetime.fromtimestamp(0, UTC)


class _Message(NamedTuple):
    subject: bytes
    sequence: int
    time: int
    pending: int
    own: bytes = b""

    def header(self) -> bytes:
        seconds, fraction = divmod(self.time, 10**9)
        text = (_EPOCH + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S")
        # As Go formats it: without trailing zeros.
        text += f".{fraction:09d}".rstrip("0").rstrip(".") + "Z"
        return (
            b"%b%bNats-Stream: o\r\nNats-Subject: %b\r\nNats-Sequence: %d\r\nNats-Time-Stamp: %b\r\n"
            b"Nats-Num-Pending: %d\r\nNats-Last-Sequence: %d\r\n\r\n"
        ) % (_FIRST, self.own, self.subject, self.sequence, text.encode(), self.pending, self.sequence - 1)


def _nanoseconds(time: datetime) -> int:
    return int((time - _EPOCH) / timedelta(microseconds=1)) * 1000


def _parse(
    headers: list[bytes], before: bytes = b"HMSG _INBOX.0123456789abcdef.1 id 200 400\r\n" * 2
) -> tuple[bytes, DirectGetMetadata]:
    buffer, starts, ends = b"", [], []
    for header in headers:
        buffer += before
        starts.append(len(buffer))
        buffer += header
        ends.append(len(buffer))
        buffer += b"a body\r\n"
    return buffer, parse_metadata(buffer, np.array(starts), np.array(ends))


def _require(messages: list[_Message], buffer: bytes, metadata: DirectGetMetadata, before: int) -> None:
    assert metadata.sequences.tolist() == [message.sequence for message in messages]
    subjects = gather_slices(buffer, metadata.subject, metadata.subject_end).to_pylist()
    assert subjects == [message.subject for message in messages]
    stored = [int((time - _EPOCH) / timedelta(microseconds=1)) for time in parse_times(buffer, metadata).to_pylist()]
    assert stored == [message.time // 1000 for message in messages]
    start = 0
    for message, end in zip(messages, metadata.own_end.tolist(), strict=True):
        assert end == start + before + len(_FIRST + message.own)
        start += before + len(message.header()) + len(b"a body\r\n")


_OWN = st.lists(
    st.sampled_from(
        [b"A: 1\r\n", b"Nats-Subject: x\r\n", b"Nats-Stream: o\r\n", _Message(b"o.b", 99, 10**18, 5).header()[10:-2]]
    ),
    max_size=3,
).map(b"".join)
_SUBJECT = st.one_of(st.sampled_from([b"o.a", b"o.b"]), st.text("ab.", min_size=1, max_size=60).map(str.encode))
_TIME = st.one_of(
    st.integers(0, 10**9 - 1).map(lambda fraction: _nanoseconds(_MORNING) + fraction),
    st.sampled_from([0, 10**8, 123_000, 999_999_999]).map(lambda fraction: _nanoseconds(_MORNING) + fraction),
    st.integers(10**18, 2 * 10**18),
)
_MESSAGE = st.builds(_Message, _SUBJECT, st.integers(1, 10**12), _TIME, st.integers(0, 10**6), _OWN)
_UNIFORM = st.builds(
    _Message, st.sampled_from([b"o.a", b"o.bc"]), st.integers(100, 999), _TIME, st.integers(10, 99), _OWN
)


@given(
    messages=st.lists(_MESSAGE, min_size=1, max_size=9) | st.lists(_UNIFORM, min_size=1, max_size=9),
    padded=st.booleans(),
)
def test_the_servers_headers_are_the_last_ones_whatever_their_widths(messages: list[_Message], padded: int) -> None:
    before = b"x" * padded
    buffer, metadata = _parse([message.header() for message in messages], before)
    _require(messages, buffer, metadata, len(before))


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("block", [b"NATS/1.0\r\n\r\n", b"NATS/1.0\r\n" + b"Other: 1\r\n" * 6 + b"\r\n"])
def test_headers_without_the_servers_are_refused(block: bytes, position: int) -> None:
    good = _Message(b"o.a", 1, _nanoseconds(_MORNING), 4).header()
    with pytest.raises(WireError, match="expected"):
        _parse([*[good] * position, block, good])


@pytest.mark.parametrize("name", [b"Stream", b"Subject", b"Sequence", b"Time-Stamp", b"Num-Pending", b"Last-Sequence"])
def test_each_of_the_servers_headers_is_required(name: bytes) -> None:
    headers = [_Message(b"o.a", sequence, _nanoseconds(_MORNING), 4).header() for sequence in range(1, 5)]
    for changed in range(4):
        wrong = headers[changed].replace(b"Nats-" + name, b"Nuts-" + name)
        with pytest.raises(WireError, match="expected 'Nats-" + name.decode()):
            _parse([*headers[:changed], wrong, *headers[changed + 1 :]])
