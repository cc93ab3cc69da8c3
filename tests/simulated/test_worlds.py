"""Worlds of the simulated server: whatever happens at once, an independent account agrees.

``SEEDS=0:1000`` plays more of them, and so does ``make simulate SEEDS=0:1000``, which prints how many a minute.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from testbed.simulated.loop import Draws
from testbed.simulated.plan import Fault, Plan
from testbed.simulated.shrinking import shrink
from testbed.simulated.world import Outcome, drawn_plan, play_world

# Worlds that have failed once, as the generator prints them, and what was wrong: they need no generator, since all that
# it draws stands in their plans. `tools/mutations` has each defect, which is noticed here.
KEPT = [json.loads(line) for line in (Path(__file__).parent / "worlds.jsonl").read_text().splitlines()]
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


@pytest.mark.parametrize("world", KEPT, ids=lambda world: world["seed"])
def test_a_world_that_has_failed_once_fails_no_more(world: dict[str, Any]) -> None:
    outcome = play_world(world["seed"], plan=Plan.of(world["plan"]))
    assert not outcome.problems, "\n".join([world["what"], *outcome.story, *outcome.problems])


def test_what_one_actor_draws_does_not_depend_on_the_others() -> None:
    draws = Draws(7)
    first = draws.of("worker 1").random()
    again = Draws(7)
    assert again.of("worker 2").random() != first
    assert (again.of("worker 1").random(), again.of("worker 1").random() != first) == (first, True)


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
        lost, kinds = plan.jobs[1] > 1 and plan.workers, plan.kinds
        problems = (f"{seed} (p1-1) was lost",) if lost and "power" in kinds else ("9 (p0-1) was lost",)
        return Outcome(seed, plan, problems, Counter(), ())

    monkeypatch.setattr("testbed.simulated.shrinking.play_world", failing)
    faults = tuple(Fault(at, kind, 1) for at, kind in enumerate(("server", "power", "actor", "connection", "power")))
    plan = replace(drawn_plan(7), jobs=(5, 3), workers=3, waits=4, watchers=1, people=1, faults=faults)
    smallest = shrink(Outcome(7, plan, ("8 (p1-1) was lost",), Counter(), ())).plan
    # Another job that is lost is another problem.
    assert (smallest.jobs, smallest.workers, smallest.waits, smallest.people) == ((0, 3), 1, 0, 0)
    assert [fault.kind for fault in smallest.faults] == ["power"]


def test_a_plan_is_kept_as_a_line() -> None:
    for seed in range(20):
        plan = drawn_plan(seed)
        assert Plan.of(json.loads(json.dumps(plan.fields()))) == plan
