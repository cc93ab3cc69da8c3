"""Very many awaited jobs are kept, reported and cut into slices."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_jetstream.jetstream import Cursor, WaitPolicy, WaitReport
from airflow_provider_jetstream.jetstream.publishing.report import sequence_ranges
from airflow_provider_jetstream.jetstream.waiting.ends import EndKind, JobEnd
from airflow_provider_jetstream.jetstream.waiting.report import ManySequences, report_on
from airflow_provider_jetstream.jetstream.waiting.waiter import AwaitedJobs, Waiter
from testbed import seams

CURSOR = Cursor("q", "2026-01-01T00:00:00Z", "q-events", 1, None, 1)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a wait for ten jobs be one for many."""
    monkeypatch.setattr(seams.AWAITED_JOBS_MANY, 10)


def waiter_of(*sequences: int) -> Waiter:
    return Waiter(CURSOR, WaitReport(set(sequences)), WaitPolicy(), lambda _: None, {})


@pytest.mark.parametrize("kind", [set, ManySequences])
async def test_some_jobs_that_have_not_ended_are_found_in_order_between_two_sequences(kind: type[Any]) -> None:
    waiters = [waiter_of(*range(1, 10_001)), waiter_of(5, 20_000)]
    waiters[0].report.awaited = kind(range(1, 10_001))
    awaited = AwaitedJobs()
    for waiter in waiters:
        awaited.add(waiter)
    assert awaited.some(0, 20_000, 3) == [1, 2, 3]
    assert awaited.some(0, 20_000, 3, besides=[1, 3]) == [2, 4, 5]
    assert awaited.some(9_998, 20_000, 64) == [9_999, 10_000, 20_000]
    assert awaited.some(9_998, 10_000, 1) == [9_999]
    for sequence in range(1, 10_000):
        waiters[0].report.record(JobEnd(EndKind.DEAD, sequence))
    # Another wait doesn't know of the end yet.
    assert awaited.some(0, 20_000, 64) == [5, 10_000, 20_000]
    assert awaited.some(10_000, 19_999, 64) == []
    awaited.remove(waiters[1])
    assert awaited.some(0, 20_000, 64) == [10_000]
    assert 20_000 not in awaited


@pytest.mark.parametrize(
    "ranges", [[], [(1, 40_000)], [(5, 9), (16_380, 16_390), (70_000, 70_000)], [(3, 5), (4, 20_000)]]
)
async def test_the_jobs_of_a_wait_are_those_of_its_ranges(
    monkeypatch: pytest.MonkeyPatch, ranges: list[tuple[int, int]]
) -> None:
    expected = {number for first, last in ranges for number in range(first, last + 1)}
    for most in (0, 10**9):
        monkeypatch.setattr(seams.REPORT_MANY, most)
        report = await report_on(ranges)
        assert isinstance(report.awaited, ManySequences) == (most == 0)
        assert (len(report.awaited), set(report.awaited)) == (len(expected), expected)
        assert report.as_json()["details"]["awaited"] == sequence_ranges(expected)
        for number in sorted(expected)[::2]:
            report.record(JobEnd(EndKind.COMPLETED, number))
        assert (report.awaited, report.completed) == (set(sorted(expected)[1::2]), set(sorted(expected)[::2]))
        assert report.as_json()["completed_sequences"] == sequence_ranges(sorted(expected)[::2])
        assert {0, 50_000} & set(report.awaited) == set()
        report.awaited.discard(10**15)
        assert 10**15 not in report.awaited
