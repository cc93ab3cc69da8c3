from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from airflow_provider_jetstream.jetstream.advisories import (
    Completion,
    MaxDeliveries,
    Terminated,
    parse_advisory,
)

# As a server 2.15.0 sent them.
MAX_DELIVER = (
    b'{"type":"io.nats.jetstream.advisory.v1.max_deliver","id":"a","timestamp":"2026-11-20T17:07:20.271234567Z",'
    b'"stream":"orders","consumer":"w","stream_seq":1,"deliveries":2,"domain":"hub"}'
)
TERMINATED = (
    b'{"type":"io.nats.jetstream.advisory.v1.terminated","id":"b","timestamp":"2026-11-20T17:07:20Z","stream":"orders",'
    b'"consumer":"w","consumer_seq":9,"stream_seq":3,"deliveries":1,"reason":"bad printer"}'
)


def test_a_max_deliver_advisory_is_parsed_with_its_time() -> None:
    advisory = parse_advisory(MAX_DELIVER)
    assert isinstance(advisory, MaxDeliveries)
    assert (advisory.stream, advisory.consumer, advisory.stream_seq, advisory.deliveries) == ("orders", "w", 1, 2)
    assert advisory.timestamp == datetime(2026, 11, 20, 17, 7, 20, 271234, UTC)


def test_a_termination_is_parsed_with_and_without_a_reason() -> None:
    advisory = parse_advisory(TERMINATED)
    assert isinstance(advisory, Terminated)
    assert (advisory.reason, advisory.stream_seq) == ("bad printer", 3)
    unexplained = parse_advisory(TERMINATED.replace(b',"reason":"bad printer"', b""))
    assert isinstance(unexplained, Terminated)
    assert unexplained.reason == ""


@pytest.mark.parametrize("result", [None, "text", 0, [1, None], {"größe": {"a": None}}], ids=repr)
def test_a_completion_is_parsed_as_it_was_encoded(result: object) -> None:
    written = Completion(
        timestamp=datetime(2026, 1, 1, tzinfo=UTC),
        stream="orders",
        consumer="w",
        stream_seq=7,
        deliveries=1,
        job_id="order-7",
        worker="worker-1",
        result=result,
    )
    assert parse_advisory(written.model_dump_json(exclude_none=True).encode()) == written


def test_a_completion_of_a_worker_in_another_language_needs_only_the_fields_that_identify_the_job() -> None:
    body = {
        "type": "io.airflow.jetstream.v1.completion",
        "timestamp": "2026-01-01T00:00:00Z",
        "stream": "orders",
        "consumer": "w",
        "stream_seq": 7,
        "deliveries": 1,
    }
    completion = parse_advisory(json.dumps(body).encode())
    assert isinstance(completion, Completion)
    assert (completion.job_id, completion.worker, completion.result) == (None, None, None)


def changed(**changes: Any) -> bytes:
    body = json.loads(MAX_DELIVER) | changes
    return json.dumps({key: value for key, value in body.items() if value is not None}).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"order-7",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{}",
        changed(type=None),
        changed(type="io.nats.jetstream.advisory.v1.api_audit"),
        changed(stream=None),
        changed(stream_seq=None),
        changed(stream_seq="first"),
        changed(timestamp="yesterday"),
    ],
    ids=repr,
)
def test_any_other_body_is_none(body: bytes) -> None:
    assert parse_advisory(body) is None


@pytest.mark.parametrize(
    "name", ["\\r0", "a\\n2026-01-01 INFO job ended", "\\u2028", "a\\u001b[2K", "a.b", "*", ">", "a b"]
)
@pytest.mark.parametrize("field", [b'"consumer":"w"', b'"stream":"orders"'])
def test_what_is_no_name_of_a_stream_or_consumer_is_no_advisory(field: bytes, name: str) -> None:
    # With the raw name, the end of a job had a note of two lines.
    assert parse_advisory(MAX_DELIVER.replace(field, field[: field.index(b":")] + f':"{name}"'.encode())) is None
