"""Each kind of evidence against each answer of a server, and against what the message of another kind says."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from airflow_provider_jetstream.jetstream.client.message import StoredMessage
from airflow_provider_jetstream.jetstream.contract import id_token
from airflow_provider_jetstream.jetstream.evidence import TABLE, proves_nothing

_TOKENS = {
    "queue": "q",
    "consumer": "worker",
    "sequence": "7",
    "delivery": "1",
    "subject…": "q.jobs.a",
    "token": id_token("order-7"),
    "operation": "op1",
    "id": "r1",
    "run": "run1",
    "number": "0",
    "digest": "d1",
    "key": "k1",
}
_COPIED = (
    ("Nats-Stream", "q"),
    ("Nats-Subject", "q.jobs.a"),
    ("Nats-Sequence", "7"),
    ("Nats-Time-Stamp", "2026-11-27T00:00:00Z"),
)
_API = "io.nats.jetstream.api.v1"
_ANSWERS: dict[str, tuple[bytes, tuple[tuple[str, str], ...]]] = {
    "empty": (b"", ()),
    "PubAck": (b'{"stream":"q","seq":7}', ()),
    "PubAck of another queue": (b'{"stream":"other", "seq":7,"domain":"hub"}', ()),
    "duplicate": (b'{"stream":"q","seq":7,"duplicate":true}', ()),
    "PubAck of a batch": (b'{"stream":"q","seq":9,"batch":"b1","count":2}', ()),
    "flow of a fast batch": (b'{"type":"ack","seq":7,"msgs":10}', ()),
    "counter": (b'{"stream":"q","seq":7,"val":"12"}', ()),
    "refusal": (
        b'{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 1"},"stream":"q","seq":0}',
        (),
    ),
    "status 404": (b"", (("Status", "404"), ("Description", "No Messages"))),
    "status 408": (b"", (("Nats-Pending-Messages", "1"), ("Nats-Pending-Bytes", "0"))),
    "status 409": (b"", (("Nats-Pending-Messages", "1"),)),
    "heartbeat": (b"", (("Nats-Last-Consumer", "7"), ("Nats-Last-Stream", "7"))),
    "API answer": (
        json.dumps({"type": f"{_API}.stream_info_response", "config": {"name": "q"}, "stream": "q"}).encode(),
        (),
    ),
    "API error": (json.dumps({"type": f"{_API}.stream_msg_get_response", "error": {"code": 404}}).encode(), ()),
    "server info": (b'{"server":{"name":"n1"},"data":{"user":"mallory","account":"A"}}', ()),
    "service": (b'{"name":"s","id":"x","version":"1.0.0","metadata":{},"type":"io.nats.micro.v1.ping_response"}', ()),
    "marker": (b"", (("Nats-Marker-Reason", "MaxAge"), ("Nats-TTL", "1s"))),
}


def _subject(row_subject: str) -> str:
    return ".".join(_TOKENS[part[1:-1]] if part.startswith("<") else part for part in row_subject.split("."))


_ROWS = {row.subject: row for row in TABLE}
_EVENT = {"timestamp": "2026-11-27T00:00:00Z", "stream": "q", "consumer": "worker", "stream_seq": 7, "deliveries": 1}
_ADVISORIES = {
    "completed": "io.airflow.jetstream.v1.completion",
    "ACK": "io.nats.jetstream.metric.v1.consumer_ack",
    "MAX_DELIVERIES": "io.nats.jetstream.advisory.v1.max_deliver",
    "MSG_TERMINATED": "io.nats.jetstream.advisory.v1.terminated",
    "MSG_NAKED": "io.nats.jetstream.advisory.v1.nak",
}


def _true_message(row_subject: str) -> tuple[bytes, tuple[tuple[str, str], ...]]:
    """Return body and headers of a message that is what its subject is for."""
    for part, kind in _ADVISORIES.items():
        if part in row_subject.split("."):
            return json.dumps({"type": kind, **_EVENT}).encode(), ()
    if row_subject.startswith(("dead.", "parked.")):
        return b"", (("Dead-Letter-Sequence", "7"), ("Dead-Letter-Reason", "terminated"))
    if row_subject.startswith(("entries.", "archive.")):
        return b"", _COPIED
    body = {
        "cancelled": {"stream": "q", "job_id": "order-7", "timestamp": "2026-11-27T00:00:00Z"},
        "attempts": {"type": "io.airflow.jetstream.v1.attempt", **_EVENT},
        "published": {"type": "io.airflow.jetstream.v1.published"},
        "handled": {"by": "ann"},
        "requeued": {"stream": "q", "sequence": 7},
        "letters": {"stream": "q", "created": "c", "sequence": 7, "action": "redriven"},
        "ranges": {"stream": "q", "created": "c", "action": "redriven", "groups": []},
        "intents": {"stream": "q", "operation": "op1", "letters": [], "target": {}},
        "account": {"stream": "q", "created": "c"},
        "lease": {"operation": "redrive", "seconds": 30},
        "lease-renewal": {"token": 3},
        "runs": {"stream": "q", "run": "run1"},
        "redrives": {"stream": "q", "created": "c", "id": "r1"},
        "redrive-controls": {"action": "pause"},
        "ordered": {"stream": "q", "key": "k"},
    }
    tokens = row_subject.split(".")
    return json.dumps(body[tokens[2] if tokens[0] == "audit" else tokens[0]]).encode(), ()


def _message(subject: str, data: bytes, headers: tuple[tuple[str, str], ...]) -> StoredMessage:
    return StoredMessage(subject, 12, datetime(2026, 11, 27, tzinfo=UTC).isoformat(), headers, data)


@pytest.mark.parametrize("row", _ROWS)
def test_no_answer_of_the_server_is_evidence_of_any_kind(row: str) -> None:
    subject = _subject(row)
    assert not proves_nothing(_message(subject, *_true_message(row)))
    believed = [
        what for what, (body, headers) in _ANSWERS.items() if not proves_nothing(_message(subject, body, headers))
    ]
    assert believed == []


@pytest.mark.parametrize("row", _ROWS)
def test_evidence_about_something_else_than_its_subject_names_is_none(row: str) -> None:
    body, headers = _true_message(row)
    for token in ("q", "worker", "7", "op1", "r1", "run1", _TOKENS["token"]):
        others = [other for other in _subject(row).split(".") if other == token]
        if not others or (token == "q" and not body and not headers) or _is_free(row, token):
            continue
        tokens = ["other" if part == token else part for part in _subject(row).split(".")]
        if token == "7":
            tokens = ["8" if part == "7" else part for part in _subject(row).split(".")]
        assert proves_nothing(_message(".".join(tokens), body, headers)), (row, token)


def _is_free(row: str, token: str) -> bool:
    """Return whether a body of a kind doesn't repeat a token of its subject."""
    place = row.split(".")
    if place[0] in ("handled", "published") or place[-1] in ("lease", "lease-renewal") or "redrive-controls" in place:
        return True
    # Headers that repeat queue and consumer are optional; a copy says its stream by itself.
    return (place[0] in ("dead", "parked", "entries", "archive")) and token in ("q", "worker")


@pytest.mark.parametrize("row", _ROWS)
def test_what_the_server_copies_or_makes_of_a_schedule_is_no_evidence(row: str) -> None:
    body, headers = _true_message(row)
    scheduled = (*headers, ("Nats-Scheduler", "scheduled.q.once.a.b"))
    assert proves_nothing(_message(_subject(row), body, scheduled))
    copied = (*headers, *_COPIED[:1], ("Nats-Subject", "something.else"))
    assert proves_nothing(_message(_subject(row), body, copied))


@pytest.mark.parametrize(
    "headers",
    [
        {"Dead-Letter-Stream": "other"},
        {"Dead-Letter-Consumer": "other"},
        {"Dead-Letter-Sequence": "8"},
        {"Dead-Letter-Sequence": "0"},
        {"Dead-Letter-Sequence": "x"},
        {"Other": "1"},
    ],
)
def test_a_record_about_another_job_than_its_subject_names_is_none(headers: dict[str, str]) -> None:
    assert proves_nothing(_message("dead.q.worker.7", b"body", tuple(headers.items())))
    assert proves_nothing(_message("parked.q.worker.7", b"body", tuple(headers.items())))


@pytest.mark.parametrize(
    "body", [b"{}x", b"[]", b"yes", b'{"type":"io.airflow.jetstream.v1.completion"}', b"{", b"\xff", b" "]
)
def test_a_report_of_a_handler_is_a_json_object_of_its_own_type(body: bytes) -> None:
    assert proves_nothing(_message("handled.q.7", body, ()))
    typed = b'{"type":"io.airflow.jetstream.v1.handled"}'
    assert not any(proves_nothing(_message("handled.q.7", good, ())) for good in (b"{}", b'{"by":"ann"}', typed))
    for number in ("0", "-1", "x", "1" * 30, "\u0667"):
        assert proves_nothing(_message(f"handled.q.{number}", typed, ()))
