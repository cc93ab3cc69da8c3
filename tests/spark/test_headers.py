from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_provider_jetstream.spark.deliveries import deliveries
from airflow_provider_jetstream.spark.errors import WireError
from airflow_provider_jetstream.spark.gathering import as_text, gathered
from airflow_provider_jetstream.spark.headers import got, own_pairs, pairs

_PIECE = st.sampled_from([b"Key", b"key", b":", b": ", b" ", b"\t", b"v", "ü".encode(), b"\xff", b"\n", b"\r", b"a b"])
_LINE = st.one_of(
    st.builds(lambda key, value: key + b": " + value, st.sampled_from([b"Key", b"Nats-Msg-Id"]), st.binary(max_size=9)),
    st.lists(_PIECE, max_size=6).map(b"".join),
)
_BLOCK = st.one_of(
    st.just(b""),
    st.lists(_LINE, max_size=4).map(
        lambda lines: b"NATS/1.0\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n"
    ),
)


@settings(deadline=None, max_examples=500)
@given(blocks=st.lists(st.tuples(_BLOCK, st.binary(max_size=20)), min_size=1, max_size=12))
def test_headers_in_bulk_are_those_of_each_message(blocks: list[tuple[bytes, bytes]]) -> None:
    buffer, starts, ends = b"", [], []
    for block, between in blocks:
        starts.append(len(buffer))
        buffer += block
        ends.append(len(buffer))
        buffer += between
    found = pairs(buffer, np.array(starts), np.array(ends))
    found.validate(full=True)
    assert found.to_pylist() == [own_pairs(block[len(b"NATS/1.0\r\n") :]) for block, _ in blocks]


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (b"A: 1\r\nA: 2\r\n", [("A", "1"), ("A", "2")]),
        (b"A:1\r\n", [("A", "1")]),
        (b"A: \r\nB:\r\n", [("A", ""), ("B", "")]),
        (b"A:  two  \t\r\n", [("A", "two")]),
        (b"A: b: c\r\n", [("A", "b: c")]),
        (b"no colon\r\nA: 1\r\n", [("A", "1")]),
        (b": nothing\r\n", []),
        (b"A: \xff\r\n", [("A", "\ufffd")]),
    ],
)
def test_a_header_is_read_as_clients_read_it(block: bytes, expected: list[tuple[str, str]]) -> None:
    whole = b"NATS/1.0\r\n" + block + b"\r\n"
    (found,) = pairs(whole, np.array([0]), np.array([len(whole)])).to_pylist()
    assert [(pair["key"], pair["value"]) for pair in found] == expected


_ADDED = (
    b"Nats-Stream: o\r\nNats-Subject: o.a\r\nNats-Sequence: %d\r\nNats-Time-Stamp: 2026-11-21T15:10:11.6090708%dZ\r\n"
    b"Nats-Num-Pending: 4\r\nNats-Last-Sequence: 3\r\n\r\n"
)


def test_what_a_direct_get_adds_comes_last() -> None:
    own = [b"", b"A: 1\r\n", _ADDED[:-2] % (99, 9)]
    blocks = [b"NATS/1.0\r\n" + mine + _ADDED % (at, at) for at, mine in enumerate(own, 1)]
    told = got(pa.array(blocks, pa.binary()))
    assert told.sequences.tolist() == [1, 2, 3]
    assert told.subjects.to_pylist() == ["o.a"] * 3
    assert [time.isoformat() for time in told.times.to_pylist()] == ["2026-11-21T15:10:11.609070+00:00"] * 3
    assert told.own_end.tolist() == [len(b"NATS/1.0\r\n" + mine) for mine in own]


@pytest.mark.parametrize("block", [b"NATS/1.0\r\n\r\n", b"NATS/1.0\r\n" + b"Other: 1\r\n" * 6 + b"\r\n"])
def test_headers_without_what_a_direct_get_adds_are_told(block: bytes) -> None:
    with pytest.raises(WireError, match="expected"):
        got(pa.array([_ADDED % (1, 1), block], pa.binary()))


@pytest.mark.parametrize(
    "form", [b"$JS.ACK.o.c.1.%d.%d.1795273816157554782.%d", b"$JS.ACK.hub.HASH.o.c.1.%d.%d.1795273816157554782.%d.Rnd"]
)
def test_a_consumer_tells_sequence_position_and_time(form: bytes) -> None:
    told = deliveries(pa.array([form % (7, 1, 11), form % (1234567, 2, 10)], pa.binary()))
    assert told.sequences.tolist() == [7, 1234567]
    assert told.positions.tolist() == [1, 2]
    assert told.times.tolist() == [1795273816157554782] * 2
    assert told.pending == 10


@pytest.mark.parametrize(
    "replies", [[b"_INBOX.a.b"], [b"$JS.ACK.o.c.1.1.1.1.1", b"$JS.ACK.o.c.1.1.1.1"], [b"$JS.ACK.o.c.1.x.1.1.1"]]
)
def test_reply_subjects_of_anybody_else_are_told(replies: list[bytes]) -> None:
    with pytest.raises(WireError, match="expected"):
        deliveries(pa.array(replies, pa.binary()))


def test_text_that_is_not_utf8_is_replaced() -> None:
    array = gathered(b"ab\xff\xfecd", np.array([0, 2, 4]), np.array([2, 4, 6]))
    assert as_text(array).to_pylist() == ["ab", "\ufffd\ufffd", "cd"]
