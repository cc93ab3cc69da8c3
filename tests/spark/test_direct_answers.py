from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.errors import WireError
from airflow_provider_jetstream.spark.wire.arrow_buffers import gather_slices
from airflow_provider_jetstream.spark.wire.metadata import DirectGetMetadata, parse_metadata, parse_times

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
        # As Go writes it: without zeros at the end.
        text += f".{fraction:09d}".rstrip("0").rstrip(".") + "Z"
        return (
            b"%b%bNats-Stream: o\r\nNats-Subject: %b\r\nNats-Sequence: %d\r\nNats-Time-Stamp: %b\r\n"
            b"Nats-Num-Pending: %d\r\nNats-Last-Sequence: %d\r\n\r\n"
        ) % (_FIRST, self.own, self.subject, self.sequence, text.encode(), self.pending, self.sequence - 1)


def _nanoseconds(when: datetime) -> int:
    return int((when - _EPOCH) / timedelta(microseconds=1)) * 1000


def _told(
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


def _require(messages: list[_Message], buffer: bytes, found: DirectGetMetadata, before: int) -> None:
    assert found.sequences.tolist() == [each.sequence for each in messages]
    subjects = gather_slices(buffer, found.subject, found.subject_end).to_pylist()
    assert subjects == [each.subject for each in messages]
    stored = [int((time - _EPOCH) / timedelta(microseconds=1)) for time in parse_times(buffer, found).to_pylist()]
    assert stored == [each.time // 1000 for each in messages]
    at = 0
    for each, end in zip(messages, found.own_end.tolist(), strict=True):
        assert end == at + before + len(_FIRST + each.own)
        at += before + len(each.header()) + len(b"a body\r\n")


_OWN = st.lists(
    st.sampled_from(
        [b"A: 1\r\n", b"Nats-Subject: x\r\n", b"Nats-Stream: o\r\n", _Message(b"o.b", 99, 10**18, 5).header()[10:-2]]
    ),
    max_size=3,
).map(b"".join)
_SUBJECT = st.one_of(st.sampled_from([b"o.a", b"o.b"]), st.text("ab.", min_size=1, max_size=60).map(str.encode))
_TIME = st.one_of(
    st.integers(0, 10**9 - 1).map(lambda part: _nanoseconds(_MORNING) + part),
    st.sampled_from([0, 10**8, 123_000, 999_999_999]).map(lambda part: _nanoseconds(_MORNING) + part),
    st.integers(10**18, 2 * 10**18),
)
_MESSAGE = st.builds(_Message, _SUBJECT, st.integers(1, 10**12), _TIME, st.integers(0, 10**6), _OWN)
_ALIKE = st.builds(
    _Message, st.sampled_from([b"o.a", b"o.bc"]), st.integers(100, 999), _TIME, st.integers(10, 99), _OWN
)


@settings(deadline=None, max_examples=400)
@given(
    messages=st.lists(_MESSAGE, min_size=1, max_size=9) | st.lists(_ALIKE, min_size=1, max_size=9), room=st.booleans()
)
def test_what_a_direct_get_adds_comes_last_and_is_read_whatever_its_widths(messages: list[_Message], room: int) -> None:
    before = b"x" * room
    buffer, found = _told([each.header() for each in messages], before)
    _require(messages, buffer, found, len(before))


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("block", [b"NATS/1.0\r\n\r\n", b"NATS/1.0\r\n" + b"Other: 1\r\n" * 6 + b"\r\n"])
def test_headers_without_what_a_direct_get_adds_are_told(block: bytes, place: int) -> None:
    good = _Message(b"o.a", 1, _nanoseconds(_MORNING), 4).header()
    with pytest.raises(WireError, match="expected"):
        _told([*[good] * place, block, good])


@pytest.mark.parametrize("name", [b"Stream", b"Subject", b"Sequence", b"Time-Stamp", b"Num-Pending", b"Last-Sequence"])
def test_every_header_that_is_added_has_to_be_there(name: bytes) -> None:
    headers = [_Message(b"o.a", at, _nanoseconds(_MORNING), 4).header() for at in range(1, 5)]
    for changed in range(4):
        wrong = headers[changed].replace(b"Nats-" + name, b"Nuts-" + name)
        with pytest.raises(WireError, match="expected 'Nats-" + name.decode()):
            _told([*headers[:changed], wrong, *headers[changed + 1 :]])


def test_messages_that_differ_in_digits_only_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("airflow_provider_jetstream.spark.wire.metadata._each")
    start = _nanoseconds(_MORNING)
    messages = [
        _Message(b"o.a" * (1 + at % 3), 101 + at, start + at * 987_654_321, 50, b"A: 1\r\n") for at in range(20)
    ]
    before = b"x" * 90
    buffer, found = _told([each.header() for each in messages], before)
    _require(messages, buffer, found, len(before))


def test_nothing_has_no_times() -> None:
    buffer, found = _told([_Message(b"o.a", 1, _nanoseconds(_MORNING), 4).header()])
    assert parse_times(buffer, DirectGetMetadata(*(part[:0] for part in found))).to_pylist() == []
