"""The arguments that limit a wait for jobs: numbers of ends, and a time; each may be a template."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.errors import ArgumentError
from airflow_provider_jetstream.jetstream.waiting.policy import (
    FAIL,
    RECONCILE_SECONDS,
    StallPolicy,
    WaitPolicy,
    parse_on_stall,
)
from airflow_provider_jetstream.tasks.template_values import is_templated, parse_count, parse_span

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

DEFAULT_WAIT: Final = timedelta(days=1)
DEFAULT_RECONCILE: Final = timedelta(seconds=RECONCILE_SECONDS)
WAIT_FIELDS: Final = (
    *("max_dead", "max_cancelled", "max_unaccounted", "min_completed", "wait_timeout"),
    *("reconcile", "on_stall"),
)
# Those of an operator that waits.
WAIT_ARGUMENTS: Final = (*WAIT_FIELDS, "defer_after")

_TOLERATED = ("max_dead", "max_cancelled", "max_unaccounted")
_LEAST = dict.fromkeys(_TOLERATED, 0) | {"min_completed": 1}
_WHERE_ABSENT: Mapping[str, object] = {
    "max_dead": 0,
    "max_cancelled": 0,
    "max_unaccounted": 0,
    "min_completed": None,
    "wait_timeout": DEFAULT_WAIT,
    "reconcile": DEFAULT_RECONCILE,
    "on_stall": FAIL,
    "defer_after": None,
    "cancel_on_kill": False,
    "cancel_on_failure": False,
}


def parse_wait_policy(values: Mapping[str, Any], numbers: Collection[str] = ()) -> WaitPolicy:
    """Parse the numbers of ends.

    :param values: by the names of the arguments; ``None`` for any number
    :param numbers: the arguments for which the DAG's author wrote something else than ``None``: a template of them that
        renders to nothing is refused, as it would tolerate any number
    :raises ArgumentError: one is no number, or too small
    """
    return WaitPolicy(
        **{
            name: None if values[name] is None and name not in numbers else parse_count(name, values[name], least)
            for name, least in _LEAST.items()
        }
    )


def parse_wait_timeout(value: object) -> timedelta:
    """Parse the time limit of a wait.

    :raises ArgumentError: it is no duration above 0
    """
    return parse_span("wait_timeout", value, above_zero=True)


def parse_stall_policy(values: Mapping[str, Any]) -> StallPolicy:
    """Parse what a wait does about jobs that no consumer delivers.

    :param values: the arguments ``reconcile`` and ``on_stall`` by name
    :raises ArgumentError: one can't be used
    """
    reconcile = parse_span("reconcile", values["reconcile"], above_zero=True)
    return StallPolicy(reconcile.total_seconds(), parse_on_stall(values["on_stall"]))


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
    known = {name: _WHERE_ABSENT[name] if is_templated(value) else value for name, value in values.items()}
    parse_wait_policy(known)
    parse_wait_timeout(known["wait_timeout"])
    parse_stall_policy(known)


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
