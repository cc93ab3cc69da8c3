"""Summaries count letters by groups, ranges and ages."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from airflow_provider_jetstream.jetstream import (
    DeadLetter,
    Death,
    Reason,
)
from airflow_provider_jetstream.jetstream.dead_letters.find import Summary
from airflow_provider_jetstream.jetstream.dead_letters.group import group_fields
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


def letter(sequence: int, age: float = 1.0, subject: str = "jobs") -> DeadLetter:
    died_at = NOW - timedelta(seconds=age)
    death = Death("queue", "", sequence, "worker", Reason.MAX_DELIVERIES, died_at)
    return DeadLetter(death, subject, b"", (), "", BodySource.QUEUE, (), preserved=True, ready_at=died_at)


def test_groups_have_counts_and_ages_the_largest_first() -> None:
    summary = Summary(NOW, group_fields(["subject", "reason"]))
    for sequence, age, subject in ((1, 5, "a"), (2, 60, "b"), (3, 90.5, "b")):
        summary.add(letter(sequence, age, subject))
    as_json = summary.as_json()
    assert as_json["groups"] == [
        {"group": {"subject": "b", "reason": "max_deliveries"}, "count": 2, "oldest_age_seconds": 90.5},
        {"group": {"subject": "a", "reason": "max_deliveries"}, "count": 1, "oldest_age_seconds": 5.0},
    ]
    assert as_json["oldest_age_seconds"] == 90.5
    json.dumps(as_json)


@pytest.mark.parametrize(
    ("group_by", "count", "seconds", "reached"),
    [
        ((), 3, 0, True),
        ((), 4, 0, False),
        ((), 3, 90, True),
        ((), 3, 91, False),
        (("subject",), 2, 0, True),
        (("subject",), 3, 0, False),
        (("subject",), 2, 60, False),
        (("subject",), 1, 90, True),
    ],
)
def test_one_group_has_to_reach_the_threshold(
    group_by: tuple[str, ...], count: int, seconds: float, *, reached: bool
) -> None:
    summary = Summary(NOW, group_fields(group_by))
    for sequence, age, subject in ((1, 5, "a"), (2, 10, "a"), (3, 90, "b")):
        summary.add(letter(sequence, age, subject))
    assert summary.reached(count, timedelta(seconds=seconds)) is reached


def test_sequences_are_reported_as_ranges_with_the_number_left_out() -> None:
    summary = Summary(NOW, ())
    for sequence in (1, 2, 3, 7, 9, 10):
        summary.add(letter(sequence))
    as_json = summary.as_json()
    assert (as_json["dead"], as_json["sequences"], as_json["ranges_left_out"]) == (6, [[1, 3], [7, 7], [9, 10]], 0)
    many = Summary(NOW, ())
    for number in range(1_003):
        many.add(letter(number * 3 + 1))
        many.add(letter(number * 3 + 2))
    as_json = many.as_json()
    assert (as_json["dead"], len(as_json["sequences"]), as_json["ranges_left_out"]) == (2_006, 1_000, 3)
    assert as_json["sequences"][-1] == [2_998, 2_999]


def test_an_empty_summary_reaches_no_threshold_and_ages_are_never_negative() -> None:
    assert not Summary(NOW, ()).reached(1)
    assert Summary(NOW, ()).as_json()["oldest_age_seconds"] is None
    ahead = Summary(NOW, ())
    ahead.add(letter(1, -3))
    assert ahead.reached(1)
    assert ahead.as_json()["oldest_age_seconds"] == 0
