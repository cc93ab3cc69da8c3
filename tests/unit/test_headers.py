from __future__ import annotations

from copy import deepcopy

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.client.headers import (
    ExactValue,
    Headers,
    encode_headers,
    exact_pair,
    first,
    parse_headers,
)
from airflow_provider_jetstream.jetstream.client.wire_text import UNKNOWN_BYTE, is_encodable, readable_text

_PIECE = st.sampled_from(
    [b"Key", b"key", b":", b": ", b" ", b"\t", b"v", "ü\ufffd".encode(), b"\xff", b"\n", b"\r", b"\0"]
)
_LINE = st.one_of(
    st.builds(lambda key, value: key + b": " + value, st.sampled_from([b"Key", b"Two Words"]), st.binary(max_size=9)),
    st.lists(_PIECE, min_size=1, max_size=6).map(b"".join),
)


def block(lines: list[bytes]) -> bytes:
    return b"".join([b"NATS/1.0\r\n", *(line + b"\r\n" for line in lines), b"\r\n"])


@given(st.lists(_LINE, max_size=6))
@example([b"A:b", b" folded: x", b"no colon", b"A: b ", b"A: b"])
def test_headers_are_sent_as_they_were_stored(lines: list[bytes]) -> None:
    raw = block(lines)
    # An empty line says nothing.
    assume(b"" not in raw.split(b"\r\n")[1:-2])
    pairs = parse_headers(raw)
    assert encode_headers(Headers(pairs)) == raw
    assert encode_headers(Headers(deepcopy(pairs))) == raw


@given(st.lists(st.tuples(st.text(), st.text()), max_size=4))
def test_no_value_adds_a_line(pairs: list[tuple[str, str]]) -> None:
    encodable = [(name, value) for name, value in pairs if is_encodable(name + value)]
    assert encode_headers(Headers(encodable)).count(b"\r\n") == 2 + len(encodable)


@pytest.mark.parametrize(
    "own", [("A", "Nats-Msg-Id: x"), ("My-Nats-Msg-Id", "x"), ("", ExactValue("a", "a Nats-Msg-Id"))]
)
def test_the_servers_headers_come_before_others_that_name_them(own: tuple[str, str]) -> None:
    encoded = encode_headers(Headers([("B", "1"), own, ("Nats-Msg-Id", "7"), ("Nats-TTL", "1s"), ("C", "2")]))
    assert encoded.startswith(b"NATS/1.0\r\nNats-Msg-Id: 7\r\nNats-TTL: 1s\r\nB: 1\r\n")
    assert encoded.endswith(b"C: 2\r\n\r\n")
    plain = [("B", "1"), ("Nats-Msg-Id", "7"), ("C", "2")]
    assert encode_headers(Headers(plain)) == b"NATS/1.0\r\nB: 1\r\nNats-Msg-Id: 7\r\nC: 2\r\n\r\n"


@pytest.mark.parametrize(
    ("raw", "name", "value"),
    [
        (b"A:b", "A", "b"),
        (b"A:  b \t", "A", "b"),
        (b"A: b\r\n c", "A", "b"),
        (b"A: K\xf6ln", "A", "K\udcf6ln"),
        (b"no colon", "A", None),
        (b"no colon\r\nA: 1\r\nA: 2", "A", "1"),
    ],
)
def test_values_are_read_without_the_form_of_their_line(raw: bytes, name: str, value: str | None) -> None:
    assert first(parse_headers(block([raw])), name) == value


@pytest.mark.parametrize("line", ["A: b\r\nNats-Rollup: all", "Nats-Rollup: all", "A: c", "", "A b"])
def test_a_line_that_is_not_the_headers_own_is_dropped(line: str) -> None:
    pair = exact_pair("A", "b", line)
    assert (pair, type(pair[1])) == (("A", "b"), str)
    assert isinstance(exact_pair("A", "b", "A:b")[1], ExactValue)


def test_what_is_no_text_is_shown_as_replacement_characters() -> None:
    assert readable_text(f"K\udcf6ln{UNKNOWN_BYTE}") == "K\ufffdln\ufffd"
    assert (is_encodable("K\udcf6ln"), is_encodable(UNKNOWN_BYTE), is_encodable("\ud800")) == (True, False, False)
