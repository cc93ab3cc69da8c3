"""Summaries of dead letters: counts, ranges, groups and ages; and the bodies that a summary preserves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import (
    DeadLetter,
    Death,
    Reason,
    RedriveRequest,
    Selection,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from testbed.face import BodySource, Summary, summarise_dead_letters
from testbed.queues import (
    eventually,
    make_dead_letters,
    make_queue,
    publish_jobs,
    pull_jobs,
    small_queue,
    store_completion,
)

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


def letter(sequence: int, age: float = 1.0, subject: str = "jobs") -> DeadLetter:
    died_at = NOW - timedelta(seconds=age)
    death = Death("queue", "", sequence, "worker", Reason.MAX_DELIVERIES, died_at)
    return DeadLetter(death, subject, b"", (), "", BodySource.QUEUE, (), preserved=True, ready_at=died_at)


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


async def test_every_letter_is_preserved_and_the_selected_ones_are_counted(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, ["one", "two"], kind="a")
    await make_dead_letters(connection, queue, ["three"], kind="b")
    await make_dead_letters(connection, queue, ["late"], kind="a")
    await store_completion(connection, queue, 4)
    summary = await summarise_dead_letters(connection, queue, Selection(subject=f"{name}.jobs.a"), ["subject"])
    assert (summary.dead, summary.ranges, summary.preserved) == (2, [(1, 2)], 3)
    assert (summary.dismissed, summary.uncertain, summary.undeliverable) == ({"completed": 1}, 0, 0)
    assert str(summary) == "2 dead letters, 1 entries about other jobs (1 completed)"
    assert (await summarise_dead_letters(connection, queue)).preserved == 0


async def test_parked_letters_are_counted_when_they_are_selected(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, ["one", "two"])
    await redrive_dead_letters(connection, queue, RedriveRequest(Selection(sequences=frozenset({1})), max_redrives=0))
    assert (await summarise_dead_letters(connection, queue, Selection(parked=True))).ranges == [(1, 1)]
    assert (await summarise_dead_letters(connection, queue)).ranges == [(2, 2)]


async def test_letters_without_an_advisory_are_counted(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await publish_jobs(connection, queue, ["one", "two"])
    # The worker dies with both, and no pull request comes.
    await pull_jobs(connection, queue, 2)

    async def dead() -> Summary | None:
        summary = await summarise_dead_letters(connection, queue)
        return summary if summary.reached(2) else None

    assert (await eventually(dead)).ranges == [(1, 2)]


async def test_a_queue_that_is_not_there_is_named(connection: NatsPyConnection, name: str) -> None:
    with pytest.raises(NotFoundError, match=name):
        await summarise_dead_letters(connection, small_queue(name))
