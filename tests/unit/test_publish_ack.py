"""PubAcks as streams send them, refusals, and answers that are no PubAck."""

from __future__ import annotations

import re

import pytest

from airflow_provider_jetstream.jetstream.client.publish_ack import PubAck, parse_publish_ack, publish_ack_pattern
from airflow_provider_jetstream.jetstream.errors import ApiError, UnreachableError

ACKS = {
    b'{"stream":"jobs", "seq":7}': PubAck("jobs", 7),
    b'{"stream":"jobs","seq":7}': PubAck("jobs", 7),
    b'{"stream":"jobs","seq":7,"duplicate": true}': PubAck("jobs", 7, duplicate=True),
    b'{"stream":"jobs", "domain":"hub", "seq":7}': PubAck("jobs", 7, domain="hub"),
    b'{"stream":"a\\"b","seq":7}': PubAck('a"b', 7),
}

# A job would count as stored, and nothing would wait for it.
NO_SEQUENCES = [
    b'{"stream":"jobs","seq":%b}' % value
    for value in (b"0", b"-1", b"true", b"18446744073709551616", b"99999999999999999999", b"1.5", b"9" * 5_000)
]


@pytest.mark.parametrize("answer", ACKS)
def test_a_publish_ack_is_parsed(answer: bytes) -> None:
    assert parse_publish_ack("jobs.new", answer) == ACKS[answer]


def test_a_refusal_keeps_codes_and_stream() -> None:
    answer = (
        b'{"error":{"code":503,"err_code":10077,"description":"maximum messages exceeded"},"stream":"jobs","seq":0}'
    )
    with pytest.raises(ApiError, match="maximum messages exceeded") as caught:
        parse_publish_ack("jobs.new", answer)
    refusal = caught.value
    assert (refusal.status, refusal.err_code, refusal.stream, refusal.subject) == (503, 10077, "jobs", "jobs.new")


@pytest.mark.parametrize(
    "answer", [b"", b"ok", b"[]", b'"x"', b'{"stream":"jobs"}', b'{"stream":1,"seq":2}', *NO_SEQUENCES]
)
def test_another_answer_is_no_publish_ack(answer: bytes) -> None:
    with pytest.raises(UnreachableError, match="expected a stream's acknowledgement on "):
        parse_publish_ack("jobs.new", answer)


def test_the_pattern_matches_the_acks_of_one_stream_only() -> None:
    pattern = re.compile(publish_ack_pattern("a.b"))
    assert [found[0] for found in pattern.finditer(b'{"stream":"a.b","seq":1}{"stream":"a.b", "seq":2}')] == [
        b'{"stream":"a.b","seq":1}',
        b'{"stream":"a.b", "seq":2}',
    ]
    assert pattern.fullmatch(b'{"stream":"a.b","seq":1,"domain":"hub"}')
    assert not pattern.search(b'{"stream":"a.b","seq":1,"domain":"hub","duplicate":true}')
    duplicates = re.compile(publish_ack_pattern("a.b", duplicates=True))
    match = duplicates.fullmatch(b'{"stream":"a.b","seq":12,"domain":"hub","duplicate":true}')
    assert match is not None
    assert match[1] == b"12"
    assert not duplicates.search(b'{"stream":"a.b","seq":1}')
    assert pattern.search(b'{"stream":"a-b","seq":1}') is None
