"""Bulk headers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.errors import WireError
from airflow_provider_jetstream.spark.source.arrow_buffers import as_text, gather_slices
from airflow_provider_jetstream.spark.source.bulk_parser import (
    DeliveryMetadata,
    header_column,
    parse_header_block,
    parse_reply_subjects,
    sizes_without_bodies,
)

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


def _buffer_of(slices: list[tuple[bytes, bytes]]) -> tuple[bytes, NDArray[np.int64], NDArray[np.int64]]:
    """Return a buffer of slices with gaps between them, and where each slice begins and ends."""
    buffer, starts, ends = b"", [], []
    for content, gap in slices:
        starts.append(len(buffer))
        buffer += content
        ends.append(len(buffer))
        buffer += gap
    return buffer, np.array(starts, np.int64), np.array(ends, np.int64)


@given(blocks=st.lists(st.tuples(_BLOCK, st.binary(max_size=20)), min_size=1, max_size=12))
def test_bulk_headers_equal_those_parsed_one_by_one(blocks: list[tuple[bytes, bytes]]) -> None:
    headers = header_column(*_buffer_of(blocks))
    headers.validate(full=True)
    assert headers.to_pylist() == [parse_header_block(block[len(b"NATS/1.0\r\n") :]) for block, _ in blocks]


_PAIRS = st.lists(
    st.tuples(st.sampled_from([b"Key", b"key", b"\xff"]), st.sampled_from([b":", b": "]), st.integers(0, 4)),
    min_size=1,
    max_size=3,
)


@given(data=st.data(), pairs=_PAIRS, ends=st.sampled_from([b"", b"\r\n"]))
def test_headers_of_one_form_equal_those_parsed_one_by_one(
    data: st.DataObject, pairs: list[tuple[bytes, bytes, int]], ends: bytes
) -> None:
    octet = st.sampled_from(b"v v:\t\r\n\xff")
    blocks = [
        b"NATS/1.0\r\n"
        + b"".join(
            key + colon + bytes(data.draw(st.lists(octet, min_size=size, max_size=size))) + b"\r\n"
            for key, colon, size in pairs
        )
        + ends
        for _ in range(data.draw(st.integers(1, 4)))
    ]
    headers = header_column(*_buffer_of([(block, b"x") for block in blocks]))
    headers.validate(full=True)
    assert headers.to_pylist() == [parse_header_block(block[len(b"NATS/1.0\r\n") :]) for block in blocks]


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
def test_a_header_is_parsed_as_client_libraries_parse_it(block: bytes, expected: list[tuple[str, str]]) -> None:
    whole = b"NATS/1.0\r\n" + block + b"\r\n"
    (headers,) = header_column(whole, np.array([0]), np.array([len(whole)])).to_pylist()
    assert [(pair["key"], pair["value"]) for pair in headers] == expected


def _parse(replies: list[bytes]) -> DeliveryMetadata:
    return parse_reply_subjects(*_buffer_of([(reply, b" 1\n") for reply in replies]))


_NUMBER = st.one_of(st.integers(10, 99), st.integers(0, 10**12), st.just(2**63 - 1))
_NUMBERS = st.tuples(_NUMBER, _NUMBER, st.integers(10**18, 2**63 - 1), _NUMBER)


@given(
    replies=st.one_of(
        st.lists(_NUMBERS, min_size=1, max_size=12), st.lists(_NUMBERS, min_size=1, max_size=1).map(lambda x: x * 3)
    ),
    form=st.sampled_from([b"$JS.ACK.o.c.1.%d.%d.%d.%d", b"$JS.ACK.hub.HASH.o.c.1.%d.%d.%d.%d.Rnd"]),
)
def test_reply_subjects_are_parsed_whatever_the_widths_of_their_numbers(
    replies: list[tuple[int, int, int, int]], form: bytes
) -> None:
    metadata = _parse([form % numbers for numbers in replies])
    rows = zip(metadata.sequences.tolist(), metadata.positions.tolist(), metadata.times.tolist(), strict=True)
    assert list(rows) == [numbers[:3] for numbers in replies]
    assert metadata.pending == replies[-1][3]


@pytest.mark.parametrize(
    "replies",
    [
        [b"_INBOX.a.b"],
        [b"$JS.ACK.o.c.1.1.1.1.1", b"$JS.ACK.o.c.1.1.1.1"],
        [b"$JS.ACK.o.c.1.x.1.1.1"],
        [b"$JS.ACK.o.c.1.1.1.%d.1" % 10**19],
    ],
)
def test_other_reply_subjects_are_refused(replies: list[bytes]) -> None:
    with pytest.raises(WireError, match="expected"):
        _parse(replies)


def test_text_that_is_not_utf8_is_replaced() -> None:
    array = gather_slices(b"ab\xff\xfecd", np.array([0, 2, 4]), np.array([2, 4, 6]))
    assert as_text(array).to_pylist() == ["ab", "\ufffd\ufffd", "cd"]


@pytest.mark.parametrize("block", [b"", b"NATS/1.0\r\n\r\n", b"NATS/1.0\r\nNats-Msg-Size: 7\r\nLater: 1\r\n\r\n"])
def test_a_message_without_the_size_of_its_body_is_refused(block: bytes) -> None:
    buffer, starts, ends = _buffer_of([(block, b"gap")])
    with pytest.raises(WireError, match="expected Nats-Msg-Size"):
        sizes_without_bodies(buffer, starts, ends)
