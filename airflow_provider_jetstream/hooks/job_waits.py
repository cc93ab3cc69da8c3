"""The hook's waits for jobs that were published elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.hooks.connected_hook import ConnectedHook
from airflow_provider_jetstream.jetstream.waiting.handle import JobsHandle
from airflow_provider_jetstream.jetstream.waiting.stalls import FAIL
from airflow_provider_jetstream.jetstream.waiting.wait_by_handle import wait_by_handle
from airflow_provider_jetstream.tasks.arguments import check_flags
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
    from datetime import timedelta

    from airflow_provider_jetstream.jetstream.waiting.report import WaitReport


class JobWaits(ConnectedHook):
    """Waits for jobs by their handle."""

    def wait(
        self,
        handle: object,
        *,
        max_dead: int | None = 0,
        max_cancelled: int | None = 0,
        max_vanished: int | None = 0,
        min_completed: int | None = None,
        wait_timeout: timedelta | float | str = DEFAULT_WAIT,
        reconcile: timedelta | float | str = DEFAULT_RECONCILE,
        on_stall: str = FAIL,
        cancel_on_failure: bool = False,
    ) -> WaitReport:
        """Wait until jobs that were published elsewhere have ended; occupies the worker slot of its task meanwhile.

        :param handle: the handle on the jobs, or what has it as ``handle``: the result of a publishing task, or the
            report of :meth:`publish`
        :param max_dead: dead letters to tolerate; ``None`` for any number
        :param max_cancelled: cancelled jobs to tolerate; ``None`` for any number
        :param max_vanished: jobs to tolerate that are gone without evidence of how they ended; ``None`` for any number
        :param min_completed: how many jobs have to complete, however the others end; not together with the three above
        :param wait_timeout: how long to wait: a duration or seconds
        :param reconcile: how long the queue has to be gone, or a job without a consumer that delivers it, until that is
            reported
        :param on_stall: ``fail`` to end the wait with an error then, ``wait`` to go on with a warning
        :param cancel_on_failure: cancel the jobs that haven't ended when the wait fails
        :return: how the jobs ended
        :raises ArgumentError: an argument can't be used
        :raises TerminalError: more jobs became dead letters, were cancelled or vanished than tolerated
        :raises JobsStalledError: no consumer delivers one of the jobs
        :raises DeadlineError: jobs haven't ended within ``wait_timeout``
        """
        options = _options(locals())
        return self.blocking(wait_by_handle, JobsHandle.of(handle), **options)

    async def await_(
        self,
        handle: object,
        *,
        max_dead: int | None = 0,
        max_cancelled: int | None = 0,
        max_vanished: int | None = 0,
        min_completed: int | None = None,
        wait_timeout: timedelta | float | str = DEFAULT_WAIT,
        reconcile: timedelta | float | str = DEFAULT_RECONCILE,
        on_stall: str = FAIL,
        cancel_on_failure: bool = False,
    ) -> WaitReport:
        """Do what :meth:`wait` does, awaited; ``await`` itself is a word of Python."""
        options = _options(locals())
        return await self.awaited(wait_by_handle, JobsHandle.of(handle), **options)


def _options(values: dict[str, Any]) -> dict[str, Any]:
    """Check the arguments of a wait, and return those of :func:`wait_by_handle`."""
    limits = {name: values[name] for name in WAIT_FIELDS}
    check_wait_limits(limits)
    check_flags(cancel_on_failure=values["cancel_on_failure"])
    stalls = parse_stall_policy(limits)
    return {
        "policy": parse_wait_policy(limits),
        "time_limit": parse_wait_timeout(limits["wait_timeout"]).total_seconds(),
        "reconcile": stalls.reconcile,
        "on_stall": stalls.on_stall,
        "cancel_on_failure": values["cancel_on_failure"],
    }
