"""The arguments that limit a wait for jobs: numbers of ends, and times; each may be a template."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from airflow_provider_jetstream.jetstream.errors import ArgumentError
from airflow_provider_jetstream.jetstream.waiting.policy import FAIL, RECONCILE_SECONDS, StallPolicy, WaitPolicy
from airflow_provider_jetstream.tasks.template_values import is_templated, parse_count, parse_span

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

DEFAULT_WAIT: Final = timedelta(days=1)
DEFAULT_RECONCILE: Final = timedelta(seconds=RECONCILE_SECONDS)

_TOLERATED = ("max_dead", "max_cancelled", "max_unaccounted")
_LEAST = dict.fromkeys(_TOLERATED, 0) | {"min_completed": 1}
WAIT_FIELDS: Final = (*_LEAST, "wait_timeout", "reconcile", "on_stall")
# Those of an operator that waits.
WAIT_ARGUMENTS: Final = (*WAIT_FIELDS, "defer_after")
_WHERE_ABSENT: Mapping[str, object] = {
    **dict.fromkeys(_TOLERATED, 0),
    **dict.fromkeys(("min_completed", "defer_after")),
    "wait_timeout": DEFAULT_WAIT,
    "reconcile": DEFAULT_RECONCILE,
    "on_stall": FAIL,
    **dict.fromkeys(("cancel_on_kill", "cancel_on_failure"), False),
}


class WaitLimits(NamedTuple):
    """The limits of a wait, parsed."""

    policy: WaitPolicy
    stalls: StallPolicy
    timeout: timedelta


def parse_wait_limits(values: Mapping[str, Any], numbers: Collection[str] = ()) -> WaitLimits:
    """Parse the limits of a wait.

    :param values: the arguments :data:`WAIT_FIELDS` by name; numbers of ends are ``None`` for any number
    :param numbers: the arguments for which the DAG's author wrote something else than ``None``: a template of them that
        renders to nothing is refused, as it would tolerate any number
    :raises ArgumentError: one can't be used
    """
    counts = {
        name: None if values[name] is None and name not in numbers else parse_count(name, values[name], least)
        for name, least in _LEAST.items()
    }
    reconcile, timeout = (parse_span(name, values[name], above_zero=True) for name in ("reconcile", "wait_timeout"))
    return WaitLimits(WaitPolicy(**counts), StallPolicy(reconcile.total_seconds(), values["on_stall"]), timeout)


def check_wait_limits(values: Mapping[str, Any]) -> None:
    """Refuse limits of a wait that can't be used; leave templates to the task.

    :param values: the arguments :data:`WAIT_FIELDS` by name
    :raises ArgumentError: one can't be used, or they exclude each other
    """
    if values["min_completed"] is not None and any(values[name] != 0 for name in _TOLERATED):
        raise ArgumentError(
            "expected min_completed alone, found it with max_dead, max_cancelled or max_unaccounted: how the other jobs"
            " end doesn't matter then; leave those out"
        )
    parse_wait_limits({name: _WHERE_ABSENT[name] if is_templated(value) else value for name, value in values.items()})


def refuse_limits_without_wait(values: Mapping[str, Any]) -> None:
    """Refuse limits of a wait that doesn't take place.

    :param values: arguments by name
    :raises ArgumentError: one is set
    """
    if found := [name for name, value in values.items() if value != _WHERE_ABSENT[name]]:
        raise ArgumentError(
            f"expected {', '.join(found)} with wait_for_completion=True only, found it without: nothing waits for the"
            " jobs, so that it would mean nothing; add wait_for_completion=True, or leave it out"
        )
