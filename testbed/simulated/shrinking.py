"""Makes a failing world smaller: actors, faults and jobs are left out as long as it fails in the same way."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Final

from testbed.simulated.world import play_world

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.simulated.plan import Plan
    from testbed.simulated.world import Outcome

_MOST_TRIES: Final = 80
_SHORTEST: Final = 2.0


def shrink(outcome: Outcome, tries: int = _MOST_TRIES) -> Outcome:
    """Return the smallest world found that fails as another one does.

    :param tries: how many worlds to play at most
    """
    while True:
        for smaller in _smaller(outcome.plan):
            if tries == 0:
                return outcome
            tries -= 1
            played = play_world(outcome.seed, plan=smaller)
            if _kinds(played) & _kinds(outcome):
                outcome = played
                break
        else:
            return outcome


def changes(plan: Plan, drawn: Plan) -> dict[str, object]:
    """Return the fields of a plan that aren't as they were drawn."""
    names = [field.name for field in fields(plan)]
    return {name: getattr(plan, name) for name in names if getattr(plan, name) != getattr(drawn, name)}


def _kinds(outcome: Outcome) -> set[str]:
    """Return the problems of a world without the names and numbers in them."""
    return {re.sub(r"\bp?\d[\d.-]*", "#", problem) for problem in outcome.problems}


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Return plans with one thing less each."""
    less: list[dict[str, Any]] = [
        {name: 0} for name in ("waits", "watchers", "people", "foreign") if getattr(plan, name)
    ]
    for number, count in enumerate(plan.jobs):
        before, after = plan.jobs[:number], plan.jobs[number + 1 :]
        less += [{"jobs": (*before, *after)}] if before or after else []
        less += [{"jobs": (*before, count // 2, *after)}] if count > 1 else []
    kinds = getattr(plan, "kinds", ())
    less += [{"kinds": (*kinds[:number], *kinds[number + 1 :])} for number in range(len(kinds)) if len(kinds) > 1]
    less += [{name: 0.0} for name in ("fails", "terminates", "outlasts", "faults") if getattr(plan, name)]
    less += [{"workers": 1}] if plan.workers > 1 else []
    less += [{"seconds": plan.seconds / 2}] if plan.seconds > _SHORTEST else []
    return (replace(plan, **change) for change in less)
