"""Whose jobs a worker takes next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.worker.consumers import FAIRNESS_WINDOW
from airflow_provider_jetstream.worker.scheduler import PriorityScheduler


def started(lanes: int, free: list[int]) -> list[int]:
    """Start jobs of lanes that all have more than enough."""
    turns, ready = PriorityScheduler(lanes), [True] * lanes
    jobs: list[int] = []
    for room in free:
        turn = turns.next(ready, room)
        assert turn is not None
        lane, count = turn
        assert 1 <= count <= room
        jobs += [lane] * count
        turns.record(lane, count, ready)
    return jobs


@given(lanes=st.integers(2, FAIRNESS_WINDOW), free=st.lists(st.integers(1, 60), min_size=1, max_size=200))
def test_ten_jobs_in_a_row_are_of_all_lanes_that_have_jobs(lanes: int, free: list[int]) -> None:
    jobs = started(lanes, free)
    for start in range(len(jobs) - FAIRNESS_WINDOW + 1):
        assert set(jobs[start : start + FAIRNESS_WINDOW]) == set(range(lanes))


def test_the_most_urgent_lane_has_all_the_rest() -> None:
    assert started(2, [1] * 20) == ([0] * 9 + [1]) * 2
    assert started(3, [1] * 19) == [0] * 8 + [1, 2] + [0] * 7 + [1, 2]
    assert started(2, [100] * 4) == ([0] * 9 + [1]) * 2


def test_a_lane_without_jobs_has_no_claim_and_takes_no_room() -> None:
    turns = PriorityScheduler(3)
    assert turns.next([False, False, False], 5) is None
    assert turns.next([True, False, False], 50) == (0, 50)
    turns.record(0, 50, [True, False, False])
    # It had none meanwhile, so it isn't owed any.
    assert turns.next([True, True, False], 50) == (0, 8)
    assert turns.next([False, True, True], 50) == (1, 8)


def test_a_lane_that_gives_nothing_on_its_turn_is_owed_nothing_more() -> None:
    turns = PriorityScheduler(2)
    turns.record(0, 9, [True, True])
    assert turns.next([True, True], 5) == (1, 1)
    turns.record(1, 0, [True, True])
    assert turns.next([True, True], 5) == (0, 5)
