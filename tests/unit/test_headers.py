from __future__ import annotations

import pytest

from airflow_provider_jetstream.jetstream.client.headers import (
    first,
    parse_headers,
)


def block(lines: list[bytes]) -> bytes:
    return b"".join([b"NATS/1.0\r\n", *(line + b"\r\n" for line in lines), b"\r\n"])


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
