"""Very many awaited jobs are kept, reported and cut into slices."""

from __future__ import annotations

import asyncio

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


async def test_some_awaited_jobs_are_chosen_in_turn() -> None:
    awaited = AwaitedJobs()
    many, other, small = waiter_of(*range(1, 40)), waiter_of(*range(30, 60)), waiter_of(5, 100)
    for waiter in (many, other, small):
        awaited.add(waiter)
    assert await awaited.some(0, 200, 0, 3) == [1, 2, 3]
    assert await awaited.some(0, 200, 3, 3, besides={4}) == [5, 6, 7]
    assert await awaited.some(50, 200, 59, 3) == [100]
    # From the first again.
    assert await awaited.some(50, 90, 59, 3) == [51, 52, 53]
    assert await awaited.some(200, 300, 0, 3) == []
    many.report.awaited -= set(range(1, 39))
    assert await awaited.some(0, 200, 0, 3) == [5, 30, 31]
    assert [waiter is many for waiter in awaited.waiters_of(39)] == [True, False]
    assert awaited.waiters_of(5) == [small]
    awaited.drop(5, small)
    awaited.remove(other)
    awaited.remove(small)
    assert (5 in awaited, 39 in awaited, 45 in awaited, 100 in awaited) == (False, True, False, False)
    assert awaited.waiters() == [many]


async def test_a_look_for_awaited_jobs_among_very_many_lets_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams.AWAITED_JOBS_SLICE, 100)
    waiter = waiter_of(*range(1, 10_001))
    awaited = AwaitedJobs()
    awaited.add(waiter)
    assert await awaited.some(0, 20_000, 0, 1) == [1]
    waiter.report.awaited -= set(range(1, 10_000))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    assert await awaited.some(0, 20_000, 0, 64) == [10_000]
    counting.cancel()
    assert turns > 90


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


def test_ranges_that_overlap_count_once() -> None:
    sequences = ManySequences()
    sequences.add_range(1, 1_000_000)
    sequences.add_range(999_990, 1_000_010)
    assert (len(sequences), sequences.ranges()) == (1_000_010, [(1, 1_000_010)])
