"""Headers and subjects are encoded as they may be on the wire."""

from __future__ import annotations

import pytest

from airflow_provider_jetstream.jetstream.client.frame_encoder import HeaderBlock, encode_subject
from airflow_provider_jetstream.jetstream.client.headers import parse_headers
from airflow_provider_jetstream.jetstream.errors import (
    ArgumentError,
    WireError,
)


def test_constant_headers_are_encoded_once() -> None:
    block = HeaderBlock({"Airflow-Task": "k", "K\xf6ln": "\udcff"}, "Nats-Msg-Id", "Job-Id")
    encoded = block.with_values("a\r\nNats-Rollup: all", "b")
    assert parse_headers(encoded) == (
        ("Nats-Msg-Id", "a  Nats-Rollup: all"),
        ("Job-Id", "b"),
        ("Airflow-Task", "k"),
        ("K\xf6ln", "\udcff"),
    )
    assert encoded.endswith(b"\r\n\r\n")
    with pytest.raises(ArgumentError, match=r"found \['Job-Id'\] in both"):
        HeaderBlock({"Job-Id": "k"}, "Job-Id")
    with pytest.raises(ArgumentError, match="the server's headers first, found Job-Id, Nats-Msg-Id"):
        HeaderBlock({}, "Job-Id", "Nats-Msg-Id")
    hidden = HeaderBlock({"Nats-Expected-Stream": "s", "A": "1"}, "Nats-Msg-Id", "Job-Id")
    assert hidden.with_values("m", "Nats-Expected-Stream: other").startswith(
        b"NATS/1.0\r\nNats-Expected-Stream: s\r\nNats-Msg-Id: m\r\nJob-Id: "
    )


@pytest.mark.parametrize("subject", ["", "a b", "a\tb", "a\r\nPUB b 0", "x" * 3_501])
def test_a_subject_that_would_be_another_command_is_refused(subject: str) -> None:
    with pytest.raises(WireError, match="expected a subject of at most 3500 bytes"):
        encode_subject(subject)
