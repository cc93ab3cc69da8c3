from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.errors import WireError
from airflow_provider_jetstream.spark.wire.arrow_buffers import as_text, gather_slices
from airflow_provider_jetstream.spark.wire.bulk_headers import header_column, parse_header_block
from airflow_provider_jetstream.spark.wire.metadata import parse_reply_subjects

if TYPE_CHECKING:
    from numpy.typing import NDArray

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


def _laid_out(stretches: list[tuple[bytes, bytes]]) -> tuple[bytes, NDArray[np.int64], NDArray[np.int64]]:
    """Give a buffer of stretches, each with something behind it, and where each begins and ends."""
    buffer, starts, ends = b"", [], []
    for stretch, between in stretches:
        starts.append(len(buffer))
        buffer += stretch
        ends.append(len(buffer))
        buffer += between
    return buffer, np.array(starts, np.int64), np.array(ends, np.int64)


@settings(deadline=None, max_examples=300)
@given(stretches=st.lists(st.tuples(st.binary(max_size=3), st.binary(max_size=9)), max_size=12))
def test_stretches_come_out_as_they_lie_there(stretches: list[tuple[bytes, bytes]]) -> None:
    found = gather_slices(*_laid_out(stretches))
    found.validate(full=True)
    assert found.to_pylist() == [stretch for stretch, _ in stretches]


@settings(deadline=None, max_examples=500)
@given(blocks=st.lists(st.tuples(_BLOCK, st.binary(max_size=20)), min_size=1, max_size=12))
def test_headers_in_bulk_are_those_of_each_message(blocks: list[tuple[bytes, bytes]]) -> None:
    found = header_column(*_laid_out(blocks))
    found.validate(full=True)
    assert found.to_pylist() == [parse_header_block(block[len(b"NATS/1.0\r\n") :]) for block, _ in blocks]


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
    (found,) = header_column(whole, np.array([0]), np.array([len(whole)])).to_pylist()
    assert [(pair["key"], pair["value"]) for pair in found] == expected


def _delivered(replies: list[bytes]) -> Deliveries:
    return parse_reply_subjects(*_laid_out([(reply, b" 1\n") for reply in replies]))


@pytest.mark.parametrize(
    "form", [b"$JS.ACK.o.c.1.%d.%d.1795273816157554782.%d", b"$JS.ACK.hub.HASH.o.c.1.%d.%d.1795273816157554782.%d.Rnd"]
)
def test_a_consumer_tells_sequence_position_and_time(form: bytes) -> None:
    told = _delivered([form % (7, 1, 11), form % (1234567, 2, 10)])
    assert told.sequences.tolist() == [7, 1234567]
    assert told.positions.tolist() == [1, 2]
    assert told.times.tolist() == [1795273816157554782] * 2
    assert told.pending == 10


_COUNT = st.one_of(st.integers(10, 99), st.integers(0, 10**12), st.just(2**63 - 1))
_TOLD = st.tuples(_COUNT, _COUNT, st.integers(10**18, 2**63 - 1), _COUNT)


@settings(deadline=None, max_examples=300)
@given(
    told=st.one_of(
        st.lists(_TOLD, min_size=1, max_size=12), st.lists(_TOLD, min_size=1, max_size=1).map(lambda x: x * 3)
    ),
    form=st.sampled_from([b"$JS.ACK.o.c.1.%d.%d.%d.%d", b"$JS.ACK.hub.HASH.o.c.1.%d.%d.%d.%d.Rnd"]),
)
def test_what_a_consumer_tells_is_read_whatever_the_widths_of_numbers(
    told: list[tuple[int, int, int, int]], form: bytes
) -> None:
    found = _delivered([form % one for one in told])
    rows = zip(found.sequences.tolist(), found.positions.tolist(), found.times.tolist(), strict=True)
    assert list(rows) == [one[:3] for one in told]
    assert found.pending == told[-1][3]


@pytest.mark.parametrize(
    "replies",
    [
        [b"_INBOX.a.b"],
        [b"$JS.ACK.o.c.1.1.1.1.1", b"$JS.ACK.o.c.1.1.1.1"],
        [b"$JS.ACK.o.c.1.x.1.1.1"],
        [b"$JS.ACK.o.c.1.1.1.%d.1" % 10**19],
    ],
)
def test_reply_subjects_of_anybody_else_are_told(replies: list[bytes]) -> None:
    with pytest.raises(WireError, match="expected"):
        _delivered(replies)


def test_text_that_is_not_utf8_is_replaced() -> None:
    array = gather_slices(b"ab\xff\xfecd", np.array([0, 2, 4]), np.array([2, 4, 6]))
    assert as_text(array).to_pylist() == ["ab", "\ufffd\ufffd", "cd"]
