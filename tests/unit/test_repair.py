"""The changes that a transform may make to a letter, and their record."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource, DeadLetter
from airflow_provider_jetstream.jetstream.errors import RedriveError
from airflow_provider_jetstream.jetstream.redrive.repair import UNCHANGED, Content, Repair, repaired_content

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.headers import Pairs

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def letter(body: bytes = b"body", headers: Pairs = ()) -> DeadLetter:
    death = Death("q", "2026-01-01T00:00:00Z", 7, "worker", Reason.MAX_DELIVERIES, NOW)
    return DeadLetter(
        death, "q.jobs.a", body, headers, "2026-01-01T00:00:00Z", BodySource.QUEUE, (), preserved=False, ready_at=NOW
    )


def repaired(repair: Any, body: bytes = b"body", headers: Pairs = ()) -> Content:
    return repaired_content(letter(body, headers), lambda _: repair)


def digest(body: bytes) -> dict[str, Any]:
    return {"bytes": len(body), "sha256": sha256(body).hexdigest()}


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        ({"a": 1, "b": [None]}, b'{"a":1,"b":[null]}'),
        (b"\xff\x00", b"\xff\x00"),
        ("größe", "größe".encode()),
        (None, b"null"),
        (UNCHANGED, b"body"),
    ],
    ids=["json", "bytes", "text", "null", "unchanged"],
)
def test_a_repair_accepts_every_form_of_body_that_a_job_accepts(body: Any, sent: bytes) -> None:
    assert repaired(Repair(body=body)).body == sent


@pytest.mark.parametrize(
    ("repair", "expected"),
    [
        (Repair(body=object()), "expected a body of bytes, text or JSON values, found object"),
        (Repair(body={"a": float("nan")}), "expected a body of bytes, text or JSON values, found dict"),
        (Repair(body="\ud800"), "expected a body of bytes, text or JSON values, found str"),
        (Repair(headers={"Nats-Msg-Id": "x"}), "headers starting with Nats- belong to the server"),
        (Repair(headers={"nats-ttl": "1s"}), "headers starting with Nats- belong to the server"),
        (Repair(headers={"Two Words": "x"}), "expected a name of letters, digits and dashes"),
        (Repair(headers={"A": "x\r\ny"}), "expected text without line breaks"),
        (Repair(headers={"A": 5}), "expected text without line breaks, found 5"),  # type: ignore[dict-item]
        (Repair(headers={5: "x"}), "expected headers by name, found {5: 'x'}"),  # type: ignore[dict-item]
        (Repair(headers=None), "expected headers by name, found None"),  # type: ignore[arg-type]
        (Repair(headers={"Redrive-Count": "0"}), "found Redrive-Count, which records its redrives"),
        (Repair(headers={"Redrive-Count": None}), "found Redrive-Count, which records its redrives"),
    ],
)
def test_a_repair_that_cannot_be_sent_leaves_the_letter_untouched(repair: Repair, expected: str) -> None:
    with pytest.raises(
        RedriveError, match=r"^the transform's repair can't be sent: .*; the letter is untouched$"
    ) as hit:
        repaired(repair)
    assert expected in str(hit.value)


def test_a_json_body_is_compared_field_by_field() -> None:
    before = json.dumps({"kept": 1, "changed": "old", "gone": None, "long": "x" * 600, "deep": {"a": [1]}}).encode()
    after = {"kept": 1, "changed": "new", "new": [1], "long": ["y" * 600], "deep": {"a": [2]}}
    assert repaired(Repair(body=after), before).changes == {
        "body": {
            "changed": {"before": "old", "after": "new"},
            "deep": {"before": {"a": [1]}, "after": {"a": [2]}},
            "gone": {"before": None, "after": None},
            "long": {
                "before": "x" * 500 + "… (600 characters)",
                "after": '["' + "y" * 498 + "… (604 characters)",
            },
            "new": {"before": None, "after": [1]},
        }
    }


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"text", b"other"), (b'{"a": 1}', b"[1]"), (b"\xff", b'{"a": 1}'), (b'{"a": 1}', b'{"a":1}')],
)
def test_other_bodies_are_compared_by_size_and_hash(before: bytes, after: bytes) -> None:
    changes = {"body": {"before": digest(before), "after": digest(after)}}
    assert repaired(Repair(body=after), before).changes == changes
