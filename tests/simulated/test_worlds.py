"""Worlds of the simulated server: whatever happens at once, an independent account agrees.

``SEEDS=0:1000`` plays more of them, and so does ``make simulate SEEDS=0:1000``, which prints how many a minute.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest

from testbed.simulated.shrinking import shrink
from testbed.simulated.world import Outcome, drawn_plan, play_world

if TYPE_CHECKING:
    from testbed.simulated.plan import Plan

# Worlds that have failed once, as the generator prints them: seed, whether calm, and what was left out of their plans.
REGRESSIONS: list[tuple[int, bool, dict[str, Any]]] = [
    # A redrive in place delivered jobs again that had died while it waited, and recorded them nowhere.
    (1, False, {"jobs": (1, 11, 1)}),
    # A watch of dead letters ended with a TypeError where a job was uncertain and the server's start isn't known.
    (100_001, False, {}),
    (100_002, False, {}),
    # A worker acknowledged a job that a loss of power had taken, and with it another one that had got its sequence.
    (
        331_000_150,
        False,
        {
            "jobs": (1, 1, 1, 1),
            "outlasts": 0.0,
            "kinds": ("connection", "connection", "server", "power", "power"),
        },
    ),
    # The archive had no leader when jobs were stored, which another program terminated: nothing has their bodies.
    (331_000_370, False, {}),
]
FIRST, LAST = map(int, os.environ.get("SEEDS", "0:8").split(":"))


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_no_job_is_lost_or_done_twice_and_no_done_job_is_called_dead_or_gone(seed: int) -> None:
    outcome = play_world(seed)
    assert not outcome.problems, "\n".join([*outcome.story, *outcome.problems])


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_in_a_calm_world_no_job_is_uncertain_or_unaccounted(seed: int) -> None:
    outcome = play_world(seed, calm=True)
    assert not outcome.problems, "\n".join([*outcome.story, *outcome.problems])


def test_one_seed_makes_one_world() -> None:
    first, second = play_world(7), play_world(7)
    assert first.story == second.story


def test_worlds_that_have_failed_once_fail_no_more() -> None:
    for seed, calm, changes in REGRESSIONS:
        outcome = play_world(seed, plan=replace(drawn_plan(seed, calm=calm), **changes))
        assert not outcome.problems, "\n".join([*outcome.story, *outcome.problems])


@pytest.mark.slow
def test_one_seed_makes_one_world_in_every_process() -> None:
    code = "from testbed.simulated.world import play_world; print(*play_world(7).story, sep='\\n')"
    stories = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len({sha256(story).hexdigest() for story in stories}) == 1
    assert len(next(iter(stories))) > 1_000


def test_a_world_that_fails_is_made_smaller_as_long_as_it_fails_in_the_same_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(seed: int, *, plan: Plan) -> Outcome:
        problems = ("5 (p0-1) was lost",) if sum(plan.jobs) > 1 and plan.workers else ("another",)
        return Outcome(seed, plan, problems, Counter(), ())

    monkeypatch.setattr("testbed.simulated.shrinking.play_world", failing)
    plan = replace(drawn_plan(7), jobs=(5, 3), workers=3, waits=4, watchers=1, people=1)
    smallest = shrink(Outcome(7, plan, ("7 (p1-2) was lost",), Counter(), ())).plan
    assert (smallest.jobs, smallest.workers, smallest.waits, smallest.people) == ((3,), 1, 0, 0)
