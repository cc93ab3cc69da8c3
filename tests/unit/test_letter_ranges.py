"""Records of the audit about many letters: what goes in comes out, and what others store there stays bounded."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from airflow_provider_jetstream.jetstream.audit.records import (
    LetterRecord,
    RecordedAction,
    encode_record,
    letter_of,
    parse_range,
    range_of,
)
from airflow_provider_jetstream.jetstream.client.message import StoredMessage

DIED = datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC)
STORED = "2026-01-02T04:00:00.123456789Z"


def record(sequence: int, **fields: Any) -> LetterRecord:
    values: dict[str, Any] = {"stream": "q", "created": "then", "action": "redriven", "new_sequence": 10**6 - sequence}
    values |= {
        "subject": f"q.jobs.{sequence % 3}",
        "reason": "max_deliveries",
        "fingerprint": "f",
        "consumer": "worker",
    }
    values |= {"died_at": DIED + timedelta(microseconds=sequence * 17 % 1000), "why": "because", "who": {"dag_id": "d"}}
    return LetterRecord(sequence=sequence, **values | fields)


def encoded_range(records: list[LetterRecord]) -> bytes:
    return encode_record(range_of([RecordedAction(each) for each in records]))


def stored(data: bytes, number: int = 0) -> StoredMessage:
    return StoredMessage(f"audit.q.ranges.{number}.any", 7, STORED, (), data)


@pytest.mark.parametrize(
    "sequences", [range(1, 1000), range(1, 1000, 7), [1, 2, 3, 500, 502, 504, 900], [9, 3, 1, 2, 1023]]
)
def test_a_letter_of_a_range_has_the_record_that_it_would_have_alone(sequences: list[int]) -> None:
    records = [
        record(each, copy_of=each - 1 if each % 2 else None, redrives=each % 4, run="r", new_stream="other")
        for each in sequences
    ]
    found = parse_range(stored(encoded_range(records)))
    assert found is not None
    assert set(found.sequences()) == set(sequences)
    for one in records:
        read = letter_of(found, one.sequence)
        assert read.model_dump(exclude={"at"}) == one.model_dump(exclude={"at"})
        assert read.at.isoformat() == "2026-01-02T04:00:00.123456+00:00"


@pytest.mark.parametrize(
    "change",
    [
        {"sequences": [[1, 1024, 1], [1, 1024, 1]]},
        {"sequences": [[1, 10**12, 0]]},
        {"sequences": [[1, 1024, 10**15]]},
        {"sequences": [[1020, 8, 1]]},
        {"sequences": [[-1, 8, 1]]},
        {"sequences": []},
        {"new_sequences": [[1, 7, 1]]},
        {"new_sequences": [[2**64 - 3, 8, 1]]},
        {"died_at": [2**62] * 8},
        {"died_at": [0, -1, 0, 0, 0, 0, 0, 0]},
        {"died_at": [1, 2]},
    ],
)
def test_what_is_no_record_of_a_range_is_none(change: dict[str, Any]) -> None:
    value = json.loads(encoded_range([record(each, subject="s") for each in range(1, 9)]))
    assert parse_range(stored(json.dumps(value).encode()))
    value["groups"][0].update(change)
    assert parse_range(stored(json.dumps(value).encode())) is None


def test_a_record_of_other_letters_than_its_subject_says_is_none() -> None:
    data = encoded_range([record(each) for each in range(1, 9)])
    assert parse_range(stored(data))
    assert parse_range(stored(data, number=1)) is None
    assert parse_range(stored(b'{"stream":"q","seq":1}')) is None
    assert parse_range(stored(b"\xff")) is None
