"""How a redrive was requested, as JSON, and what became of all its waves together."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.audit.redrives import RedriveOutcomes
from airflow_provider_jetstream.jetstream.errors import RedriveRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from airflow_provider_jetstream.jetstream.audit.redrives import Wave
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest

_PLAIN = ("subject", "rate", "max_redrives", "order_key", "census")


def plan_of(request: RedriveRequest) -> dict[str, Any]:
    """Return how letters are brought back, but for what the request leaves to its defaults."""
    plan = {name: value for name in _PLAIN if (value := getattr(request, name)) not in (None, False)}
    plan["protocol"] = request.protocol.value
    if request.target is not None:
        plan["target"] = request.target.name
    if request.transform is not None:
        plan["transform"] = _described(request.transform)
    if request.body_patch is not None:
        plan["patch"] = request.body_patch.text
    if request.waves:
        plan |= {"waves": list(request.waves), "stop_when": asdict(request.stop_rule)}
    return plan


def plan_of_resumed(plan: Mapping[str, Any], request: RedriveRequest) -> dict[str, Any]:
    """Return the plan of a redrive that goes on; a patch may be another one, which the letters that are left get.

    :param plan: as it was recorded
    :raises RedriveRequestError: it had a patch, and the request would redrive the other letters as they are
    """
    if "patch" in plan and request.patch is None and request.transform is None and request.max_redrives != 0:
        raise RedriveRequestError(
            f"expected a patch for the letters that are left, as those before got {str(plan['patch'])[:200]}, found"
            " none: give it again, or begin another redrive with a run of its own"
        )
    return {name: value for name, value in plan.items() if name != "patch"} | (
        {} if request.body_patch is None else {"patch": request.body_patch.text}
    )


def total_outcomes(waves: Iterable[Wave]) -> RedriveOutcomes:
    """Return what became of the letters of all waves; a letter that was brought back once more counts once."""
    completed = died = running = unknown = 0
    for wave in waves:
        completed += wave.outcomes.completed
        died += wave.outcomes.died_again - wave.parked_again - wave.brought_again
        unknown += wave.outcomes.unknown
        # The jobs of a wave whose outcome isn't known yet are running.
        known = sum(wave.outcomes.model_dump().values())
        running += wave.outcomes.still_running + (wave.redriven if not known else 0)
    return RedriveOutcomes(completed=completed, died_again=max(0, died), still_running=running, unknown=unknown)


def _described(transform: object) -> str:
    if described := getattr(transform, "description", None):
        return str(described)
    return f"{getattr(transform, '__module__', '')}:{getattr(transform, '__qualname__', type(transform).__name__)}"
