from __future__ import annotations

import json

import pytest

from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.plugins.monitor.letter_view import payload_of


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        (b'{"a": [1, "\xc3\xa9"]}', "json", '{\n  "a": [\n    1,\n    "é"\n  ]\n}'),
        (b"[]", "json", "[]"),
        (b"42", "text", "42"),
        (b'{"a": ', "text", '{"a": '),
        (b"<script>alert(1)</script>", "text", "<script>alert(1)</script>"),
        (b"", "text", ""),
        (b"[" * 20_000, "text", "[" * 20_000),
        (b"text\0", "binary", "00000000  74 65 78 74 00                                   text."),
        (b"\xff\xfe", "binary", "00000000  ff fe                                            .."),
    ],
)
def test_a_body_is_shown_as_json_text_or_hexadecimal_dump(body: bytes, kind: str, text: str) -> None:
    payload = payload_of(body, 100_000)
    assert (payload.kind, payload.text, payload.size, payload.truncated) == (kind, text, len(body), False)


def test_a_long_body_is_cut_between_two_characters() -> None:
    payload = payload_of("é".encode() * 10, 5)
    assert (payload.kind, payload.text, payload.size, payload.truncated) == ("text", "éé", 20, True)


def test_json_that_would_grow_too_much_is_not_indented() -> None:
    body = json.dumps([[[[1]]]] * 50).encode()
    payload = payload_of(body, len(body))
    assert (payload.kind, payload.raw, payload.parsed) == ("json", body.decode(), None)


def test_a_header_that_is_not_utf8_can_be_encoded_as_json() -> None:
    assert json.dumps(readable_text("caf\udce9")).isascii()
    assert readable_text("café") == "café"
