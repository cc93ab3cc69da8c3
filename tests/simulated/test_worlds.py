"""Worlds of the simulated server: whatever happens at once, an independent account agrees.

``SEEDS=0:1000`` plays more of them, and so does ``make simulate SEEDS=0:1000``, which prints how many a minute.
"""

from __future__ import annotations

import os

from testbed.simulated.world import play_world

FIRST, LAST = map(int, os.environ.get("SEEDS", "0:8").split(":"))


def test_no_job_is_lost_or_done_twice_and_no_done_job_is_called_dead_or_gone() -> None:
    for seed in range(FIRST, LAST):
        outcome = play_world(seed)
        assert not outcome.problems, "\n".join([*outcome.story, *outcome.problems])


def test_in_a_calm_world_no_job_is_uncertain_or_unaccounted() -> None:
    for seed in range(FIRST, LAST):
        outcome = play_world(seed, calm=True)
        assert not outcome.problems, "\n".join([*outcome.story, *outcome.problems])


def test_one_seed_makes_one_world() -> None:
    first, second = play_world(7), play_world(7)
    assert first.story == second.story
