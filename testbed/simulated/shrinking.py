"""Makes a failing world smaller: actors, faults and jobs are left out as long as it fails in the same way."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from testbed.simulated.world import play_world

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.simulated.plan import Plan
    from testbed.simulated.world import Outcome

_MOST_TRIES: Final = 80
_SHORTEST: Final = 2.0
_NUMBER: Final = re.compile(r"(\bp\d+-\d+|\b(?:waiter|watcher) \d+)|\d[\d.:+-]*")
_LIST: Final = re.compile(r"#(, #)+")


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


def _kinds(outcome: Outcome) -> set[str]:
    """Return the problems of a world without the numbers in them: those of jobs and actors stay."""
    return {_LIST.sub("#", _NUMBER.sub(lambda found: found[1] or "#", problem)) for problem in outcome.problems}


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Return plans with less each: much of what goes wrong first, and of the jobs."""
    less: list[dict[str, Any]] = []
    size = len(plan.faults)
    while size:
        starts = range(0, len(plan.faults), size)
        less += [{"faults": (*plan.faults[:start], *plan.faults[start + size :])} for start in starts]
        size //= 2
    less += [
        {name: 0} for name in ("waits", "watchers", "people", "foreign", "handlers", "tidiers") if getattr(plan, name)
    ]
    for number, count in enumerate(plan.jobs):
        # The others keep their names.
        fewer = sorted({0, count // 2} - {count})
        less += [{"jobs": (*plan.jobs[:number], some, *plan.jobs[number + 1 :])} for some in fewer]
    less += [{name: 0.0} for name in ("fails", "terminates", "outlasts") if getattr(plan, name)]
    less += [{"workers": 1}] if plan.workers > 1 else []
    less += [{"seconds": plan.seconds / 2}] if plan.seconds > _SHORTEST else []
    return (replace(plan, **change) for change in less if any(change.get("jobs", plan.jobs)))
