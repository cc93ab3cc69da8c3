"""What a diagnosis recommends, by what died and what was completed since."""

from __future__ import annotations

import tracemalloc
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from airflow_provider_jetstream.jetstream import DeadLetter, Death, Origin, Reason
from airflow_provider_jetstream.jetstream.dead_letters.diagnose import (
    Action,
    Cause,
    CauseGroup,
    CauseGroups,
    ConsumerActivity,
    RecentCompletions,
    recommend,
)
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


BUSY = ConsumerActivity(pending=0, in_flight=0, pulls=1, paused=False)


def _letter(sequence: int, **fields: Any) -> DeadLetter:
    death = Death("queue", "", sequence, "worker", Reason.MAX_DELIVERIES, NOW, **fields)
    origin = Origin(f"dag{sequence}", "run", f"task{sequence}", -1)
    headers = (("Job-Release", str(sequence)),)
    return DeadLetter(
        *(death, f"jobs.{sequence}", b"", headers, "", BodySource.QUEUE, ()),
        preserved=True,
        ready_at=NOW,
        origin=origin,
    )


@pytest.mark.slow
def test_a_hundred_thousand_letters_of_different_errors_take_little_memory_and_hide_no_large_group() -> None:
    groups = CauseGroups()
    tracemalloc.start()
    for number in range(20_000):
        # Digits alone would be masked.
        text = "".join(chr(ord("g") + int(digit)) for digit in str(number))
        groups.add(_letter(number, error_class="Random", error_message=text * 100))
        if number % 20 == 0:
            groups.add(_letter(number, error_class="Real", error_message="the one cause", traceback_digest="0" * 12))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * 2**20
    largest = groups.largest()[0]
    assert (largest.error_class, largest.count) == ("Real", 1_000)
    assert groups.letters == 21_000 == groups.left_out + sum(group.count for group in groups.largest())
    subjects, left_out = largest.subjects.largest(5)
    assert sum(count for _, count in subjects) + left_out == 1_000


def _group(
    count: int,
    first: timedelta,
    last: timedelta,
    *,
    reason: Reason = Reason.MAX_DELIVERIES,
    redriven: int = 0,
) -> CauseGroup:
    group = CauseGroup(reason, "worker", {}, NOW - first, NOW - last, 1, "Error", "text", "module:f:1")
    group.count, group.redriven = count, redriven
    return group


def _completions(since: timedelta, *spans: tuple[timedelta, int]) -> RecentCompletions:
    completions = RecentCompletions(NOW - since)
    for ago, count in spans:
        for _ in range(count):
            completions.add("worker", NOW - ago)
    return completions


HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)


@pytest.mark.parametrize(
    ("group", "completions", "activity", "expected"),
    [
        # It died a minute ago, and so did everything.
        (_group(100, HOUR, MINUTE), _completions(HOUR * 2), BUSY, (Cause.STILL_FAILING, Action.WAIT)),
        # Every second job dies, and five were completed since: that isn't enough to tell.
        (
            _group(100, HOUR, MINUTE),
            _completions(HOUR * 2, (HOUR / 2, 100), (MINUTE / 2, 5)),
            BUSY,
            (Cause.STILL_FAILING, Action.WAIT),
        ),
        # Of a hundred one dies: a hundred completed ones since prove nothing.
        (
            _group(10, HOUR, MINUTE),
            _completions(HOUR * 2, (HOUR / 2, 990), (MINUTE / 2, 100)),
            BUSY,
            (Cause.STILL_FAILING, Action.WAIT),
        ),
        # Every second one dies, and fifty were completed since.
        (
            _group(100, HOUR, MINUTE),
            _completions(HOUR * 2, (HOUR / 2, 100), (MINUTE / 2, 50)),
            BUSY,
            (Cause.NOT_SEEN_SINCE, Action.TRY_A_FEW),
        ),
        # The events reach back to half of the time only: the rate of the other half counts for it.
        (
            _group(10, HOUR, MINUTE),
            _completions(HOUR / 4, (MINUTE * 10, 500), (MINUTE / 2, 100)),
            BUSY,
            (Cause.STILL_FAILING, Action.WAIT),
        ),
        # A night ago, and nothing was tried since.
        (_group(100, HOUR * 9, HOUR * 8), _completions(HOUR * 20), BUSY, (Cause.UNKNOWN, Action.TRY_A_FEW)),
        # One dies every hour, the last half an hour ago.
        (_group(24, HOUR * 24, HOUR / 2), None, BUSY, (Cause.STILL_FAILING, Action.WAIT)),
        (_group(9, HOUR * 9, HOUR * 8, redriven=8), None, BUSY, (Cause.UNKNOWN, Action.REPAIR)),
        (_group(9, HOUR * 9, HOUR * 8, reason=Reason.EXPIRED), None, BUSY, (Cause.UNKNOWN, Action.REPAIR)),
        (_group(9, HOUR * 9, HOUR * 8, reason=Reason.TERMINATED), None, BUSY, (Cause.UNKNOWN, Action.REPAIR)),
        (
            _group(9, HOUR * 9, HOUR * 8),
            None,
            ConsumerActivity(3, 0, 0, paused=False),
            (Cause.UNKNOWN, Action.START_WORKERS),
        ),
        (_group(9, HOUR, MINUTE), None, ConsumerActivity(3, 0, 1, paused=True), (Cause.STILL_FAILING, "start_workers")),
        (_group(9, HOUR, MINUTE), None, None, (Cause.STILL_FAILING, Action.ADD_CONSUMER)),
    ],
)
def test_the_recommendation_follows_from_what_was_tried_since(
    group: CauseGroup,
    completions: RecentCompletions | None,
    activity: ConsumerActivity | None,
    expected: tuple[Cause, Action],
) -> None:
    found = recommend(group, completions, activity, NOW)
    assert (found.cause, found.action) == expected
    assert found.evidence


@pytest.mark.parametrize(
    ("count", "advice"),
    [
        (1, "redrive it"),
        (4, "redrive 1 of them first, then the others if none dies again"),
        (11, "redrive 10 of them first, then the others if none dies again"),
    ],
)
def test_no_more_letters_are_tried_first_than_there_are(count: int, advice: str) -> None:
    found = recommend(_group(count, HOUR * 8, HOUR * 8), None, BUSY, NOW)
    assert found.text == f"nothing has been tried since: {advice}"
