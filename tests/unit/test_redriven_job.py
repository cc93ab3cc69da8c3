"""What a redrive stores and records of a letter, whichever way it is built."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from airflow_provider_jetstream.jetstream.audit.records import LetterRecord, encode_record
from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource, DeadLetter
from airflow_provider_jetstream.jetstream.redrive.letter_records import LetterRecords
from airflow_provider_jetstream.jetstream.redrive.redriven_job import CopyLimit, redriven_job
from airflow_provider_jetstream.jetstream.redrive.repair import repaired_content
from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest

DIED = datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC)


def dead_letter(sequence: int = 17, headers: Any = (), body: bytes = b"body", **death: Any) -> DeadLetter:
    values: dict[str, Any] = {"stream": "q", "created": "then", "consumer": "worker", "reason": Reason.MAX_DELIVERIES}
    return DeadLetter(
        death=Death(sequence=sequence, died_at=DIED, **values | death),
        subject="q.jobs",
        body=body,
        headers=headers,
        time="2026-01-02T03:04:05Z",
        source=BodySource.QUEUE,
        entries=(3,),
        preserved=False,
        ready_at=DIED,
    )


@pytest.mark.parametrize(
    "letter",
    [
        dead_letter(),
        dead_letter(consumer=None),
        dead_letter(stream="Nats-Msg-Id", consumer="Nats-worker"),
        dead_letter(stream="warteschlange-ä", consumer="Redrive-Sequence"),
        dead_letter(body=b'{"id": "of the body"}'),
        dead_letter(headers=(("Nats-Msg-Id", "first"),)),
        dead_letter(headers=(("Nats-Msg-Id", "redrive:1:0000000000000000000000"), ("Redrive-Count", "1"))),
        dead_letter(headers=(("own", "1"), ("own", "2"), ("Redrive-Sequence", "5"), ("Nats-TTL", "1s"))),
    ],
)
def test_a_copy_says_of_which_letter_it_is(letter: DeadLetter) -> None:
    job = redriven_job(letter, repaired_content(letter, None), None, CopyLimit("q", "max", 1_000))
    named = dict(job.headers.items())
    assert named["Redrive-Sequence"] == "17"
    assert named["Redrive-Count"] == str(letter.redrives + 1)
    assert [value for name, value in job.headers.items() if name == "Nats-Msg-Id"] == [named["Nats-Msg-Id"]]
    assert named.get("Job-Id") == ("first" if ("Nats-Msg-Id", "first") in letter.headers else None)


def read(record: LetterRecord) -> LetterRecord:
    """Return a record that is stored, as every reader parses it."""
    body = encode_record(record)
    assert json.loads(body).keys() <= LetterRecord.model_fields.keys()
    return LetterRecord.model_validate_json(body)


def test_a_record_has_what_only_its_letter_has_and_replaces_what_is_not_utf_8(mocker: Any) -> None:
    records = LetterRecords(mocker.Mock(), RedriveRequest(why='"quoted"'))
    changes = {"body": {"name": {"before": "ä", "after": "\u2028"}}}
    action = records.record(
        dead_letter(), "redriven", new_sequence=18, subject="q.jobs", changes=changes, left_out={"Some": "\udcf6"}
    )
    record = read(action)
    assert (record.why, record.changes, record.left_out) == ('"quoted"', changes, {"Some": "?"})
