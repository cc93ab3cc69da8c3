"""How long a task may be deferred: Airflow itself applies ``execution_timeout`` only while the task runs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import get_current_context

if TYPE_CHECKING:
    from airflow.sdk import Context

EXECUTION_TIMEOUT = "execution_timeout"
_LEAST = timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class DeferralLimit:
    """For how long a task may be deferred.

    :param left: the time from now on
    :param argument: the argument of the operator that sets it
    """

    left: timedelta
    argument: str


def deferral_limit(operator: Any, limit: timedelta, argument: str) -> DeferralLimit:
    """Return the earlier of a time limit and what is left of the operator's ``execution_timeout``.

    That counts from the first start of this try: a task that was deferred before has used some of it.

    :param operator: the task's
    :param limit: counts from now on
    :param argument: the operator's argument that sets it
    """
    if (timeout := operator.execution_timeout) is None:
        return DeferralLimit(limit, argument)
    left = max(_LEAST, timeout - (datetime.now(UTC) - _first_start()))
    return DeferralLimit(left, EXECUTION_TIMEOUT) if left < limit else DeferralLimit(limit, argument)


def _first_start() -> datetime:
    context = _current_context()
    started: datetime | None = context["ti"].start_date if context else None
    return started or datetime.now(UTC)


def _current_context() -> Context | None:
    try:
        return get_current_context()
    except RuntimeError:
        return None
