"""The arguments of operators that wait for jobs: which ends are acceptable, and when the wait is given up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from airflow_provider_jetstream.airflow_compat import AirflowFailException
from airflow_provider_jetstream.jetstream.errors import DeadlineError
from airflow_provider_jetstream.jetstream.waiting.policy import FAIL
from airflow_provider_jetstream.tasks.arguments import check_flags
from airflow_provider_jetstream.tasks.deferral_limit import EXECUTION_TIMEOUT
from airflow_provider_jetstream.tasks.run_values import NamedMissingValues
from airflow_provider_jetstream.tasks.template_values import is_templated, parse_span
from airflow_provider_jetstream.tasks.wait_limits import (
    DEFAULT_RECONCILE,
    DEFAULT_WAIT,
    WAIT_FIELDS,
    check_wait_limits,
    parse_stall_policy,
    parse_wait_policy,
    parse_wait_timeout,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from airflow_provider_jetstream.jetstream.errors import TransientError
    from airflow_provider_jetstream.jetstream.waiting.policy import StallPolicy, WaitPolicy

_NAMED_RANGES = 5


class WaitArguments(NamedMissingValues, BaseOperator):
    """An operator with limits for a wait for jobs.

    :param max_dead: dead letters to tolerate; ``None`` for any number
    :param max_cancelled: cancelled jobs to tolerate; ``None`` for any number
    :param max_unaccounted: jobs to tolerate that are gone without evidence of how they ended; ``None`` for any number
    :param min_completed: how many jobs have to complete, 1 for any of them, however the others end; not together with
        the three above
    :param cancel_on_kill: cancel the jobs that haven't ended when a person ends the task
    :param cancel_on_failure: cancel the jobs that haven't ended when the wait fails and no retry goes on waiting
    :param wait_timeout: how long to wait: a duration or seconds
    :param reconcile: how long the queue has to be gone, or a job without a consumer that delivers it, until the task
        says so
    :param on_stall: ``fail`` to end the task then, with a retry that goes on waiting where the jobs are still stored;
        ``wait`` to go on with a warning
    :param defer_after: how long a deferrable task waits on its worker slot before it defers, which costs about ten
        seconds: a duration or seconds. Where absent, 2 to 12 seconds, for as long as the jobs are about to end
    """

    retry_resumes_waiting = True

    def __init__(
        self,
        *,
        max_dead: int | str | None = 0,
        max_cancelled: int | str | None = 0,
        max_unaccounted: int | str | None = 0,
        min_completed: int | str | None = None,
        cancel_on_kill: bool = False,
        cancel_on_failure: bool = False,
        wait_timeout: timedelta | float | str = DEFAULT_WAIT,
        reconcile: timedelta | float | str = DEFAULT_RECONCILE,
        on_stall: str = FAIL,
        defer_after: timedelta | float | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_flags(cancel_on_kill=cancel_on_kill, cancel_on_failure=cancel_on_failure)
        self.max_dead = max_dead
        self.max_cancelled = max_cancelled
        self.max_unaccounted = max_unaccounted
        self.min_completed = min_completed
        self.cancel_on_kill = cancel_on_kill
        self.cancel_on_failure = cancel_on_failure
        self.wait_timeout = wait_timeout
        self.reconcile = reconcile
        self.on_stall = on_stall
        self.defer_after = defer_after
        self._has_defer_after = defer_after is not None
        if not is_templated(defer_after):
            self._parsed_defer_after()
        limits = self._limits()
        check_wait_limits(limits)
        self._numbers = tuple(name for name, value in limits.items() if value is not None)

    def _limits(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in WAIT_FIELDS}

    def _policy(self) -> WaitPolicy:
        return parse_wait_policy(self._limits(), self._numbers)

    def _stall_policy(self) -> StallPolicy:
        return parse_stall_policy(self._limits())

    def _parsed_defer_after(self) -> float | None:
        return parse_span("defer_after", self.defer_after).total_seconds() if self._has_defer_after else None

    @property
    def _time_limit(self) -> timedelta:
        return parse_wait_timeout(self.wait_timeout)

    def _overdue(self, queue: str, missing: Sequence[Sequence[int]] | None, limited_by: str | None = None) -> Exception:
        found = f"that {queue} couldn't be read meanwhile: see whether the server was away"
        if missing is not None:
            count = sum(high - low + 1 for low, high in missing)
            named = ", ".join(f"{low}-{high}" if low != high else str(low) for low, high in missing[:_NAMED_RANGES])
            more = ", …" if len(missing) > _NAMED_RANGES else ""
            found = f"{count} of {queue} that did not (sequences {named}{more}): see whether workers take them"
        limit, argument = f"{self._time_limit}", "wait_timeout"
        if limited_by == EXECUTION_TIMEOUT:
            limit, argument = f"the execution_timeout of {self.execution_timeout}", EXECUTION_TIMEOUT
        message = f"expected every job to end within {limit}, found {found}, or raise {argument}"
        return self._resumable(DeadlineError, message)

    def _resumable(self, error: type[TransientError], message: str) -> Exception:
        """Return the error of a wait that a retry resumes, where it can; else one that isn't retried."""
        if self.retry_resumes_waiting:
            return error(f"{message}; a retry goes on waiting")
        return AirflowFailException(f"{error.code} {message}; a retry would not know of them, so there is none")
