"""The order in which a worker serves its consumers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.worker.consumers import FAIRNESS_WINDOW
from airflow_provider_jetstream.worker.fetching import PriorityScheduler


def started(consumers: int, free: list[int]) -> list[int]:
    """Return the consumers of the jobs that are started while all consumers have jobs."""
    scheduler, ready = PriorityScheduler(consumers), [True] * consumers
    jobs: list[int] = []
    for slots in free:
        choice = scheduler.next(ready, slots)
        assert choice is not None
        consumer, count = choice
        assert 1 <= count <= slots
        jobs += [consumer] * count
        scheduler.record(consumer, count, ready)
    return jobs


@given(consumers=st.integers(2, FAIRNESS_WINDOW), free=st.lists(st.integers(1, 60), min_size=1, max_size=200))
def test_ten_jobs_in_a_row_include_each_consumer_that_has_jobs(consumers: int, free: list[int]) -> None:
    jobs = started(consumers, free)
    for start in range(len(jobs) - FAIRNESS_WINDOW + 1):
        assert set(jobs[start : start + FAIRNESS_WINDOW]) == set(range(consumers))


def test_all_other_jobs_are_of_the_most_urgent_consumer() -> None:
    assert started(2, [1] * 20) == ([0] * 9 + [1]) * 2
    assert started(3, [1] * 19) == [0] * 8 + [1, 2] + [0] * 7 + [1, 2]
    assert started(2, [100] * 4) == ([0] * 9 + [1]) * 2


def test_a_consumer_without_jobs_is_neither_owed_a_job_nor_given_a_slot() -> None:
    scheduler = PriorityScheduler(3)
    assert scheduler.next([False, False, False], 5) is None
    assert scheduler.next([True, False, False], 50) == (0, 50)
    scheduler.record(0, 50, [True, False, False])
    # The others had no jobs meanwhile, so they aren't owed any.
    assert scheduler.next([True, True, False], 50) == (0, 8)
    assert scheduler.next([False, True, True], 50) == (1, 8)


def test_a_chosen_consumer_that_delivers_nothing_is_no_longer_owed_a_job() -> None:
    scheduler = PriorityScheduler(2)
    scheduler.record(0, 9, [True, True])
    assert scheduler.next([True, True], 5) == (1, 1)
    scheduler.record(1, 0, [True, True])
    assert scheduler.next([True, True], 5) == (0, 5)


@given(free=st.lists(st.integers(1, 60), min_size=1, max_size=50))
def test_with_strict_priorities_no_consumer_is_owed_a_job(free: list[int]) -> None:
    scheduler = PriorityScheduler(3, strict=True)
    for slots in free:
        assert scheduler.next([True, True, True], slots) == (0, slots)
        scheduler.record(0, slots, [True, True, True])
    assert scheduler.next([False, True, True], 5) == (1, 5)
    assert scheduler.next([False, False, False], 5) is None
