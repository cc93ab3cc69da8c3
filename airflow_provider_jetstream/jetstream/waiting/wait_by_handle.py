"""Waiting for the jobs of a handle, to a time limit and with the outcome that a policy gives."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.cancellation.cancel import cancel_stored
from airflow_provider_jetstream.jetstream.errors import DeadlineError, JetStreamProviderError
from airflow_provider_jetstream.jetstream.waiting.handle import JobsHandle
from airflow_provider_jetstream.jetstream.waiting.policy import WaitPolicy
from airflow_provider_jetstream.jetstream.waiting.report import WaitReport
from airflow_provider_jetstream.jetstream.waiting.stalls import FAIL, RECONCILE_SECONDS
from airflow_provider_jetstream.jetstream.waiting.stored_reports import failed_jobs
from airflow_provider_jetstream.jetstream.waiting.wait import wait

if TYPE_CHECKING:
    from collections.abc import Iterable

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.waiting.stalls import OnStall

log = logging.getLogger(__name__)

WHY_FAILED = "the wait for it failed"


async def wait_by_handle(
    connection: Connection,
    handle: object,
    *,
    policy: WaitPolicy | None = None,
    time_limit: float | None = None,
    reconcile: float = RECONCILE_SECONDS,
    on_stall: OnStall = FAIL,
    cancel_on_failure: bool = False,
) -> WaitReport:
    """Wait for the jobs of a handle.

    :param handle: see :meth:`JobsHandle.of`
    :param policy: which ends are acceptable; only completions where absent
    :param time_limit: seconds; without end where absent
    :param reconcile: see :func:`wait`
    :param on_stall: likewise
    :param cancel_on_failure: cancel the jobs that haven't ended when the wait fails
    :raises TerminalError: more jobs became dead letters, were cancelled or vanished than the policy accepts
    :raises DeadlineError: jobs haven't ended within the time limit
    """
    parsed, policy = JobsHandle.of(handle), policy or WaitPolicy()
    cursor = await parsed.cursor_now(connection)
    sequences, advised = await parsed.jobs(connection)
    report = WaitReport(sequences)
    try:
        async with asyncio.timeout(time_limit):
            await wait(
                *(connection, cursor, report),
                policy=policy,
                advised=advised,
                reconcile=reconcile,
                on_stall=on_stall,
            )
        ended = report.as_json()
        if policy.violation(ended) and (
            error := policy.violation(ended, (await failed_jobs(connection, cursor, ended)).describe)
        ):
            raise error
    except TimeoutError as error:
        if cancel_on_failure:
            await cancel_rest(connection, cursor.queue, cursor.events, cursor.created, report.awaited)
        if isinstance(error, JetStreamProviderError):
            raise
        raise DeadlineError(
            f"expected every job of {cursor.queue} to end within {time_limit:g} s, found {len(report.awaited)} that did"
            " not: see whether workers take them, or wait longer"
        ) from None
    except JetStreamProviderError:
        if cancel_on_failure:
            await cancel_rest(connection, cursor.queue, cursor.events, cursor.created, report.awaited)
        raise
    return report


async def cancel_rest(connection: Connection, queue: str, events: str, created: str, awaited: Iterable[int]) -> None:
    """Cancel the jobs of a failed wait that haven't ended; what prevents that is logged only.

    :param queue: the work queue's name
    :param events: its events stream's name
    :param created: when the work queue's stream was created
    :param awaited: the jobs' stream sequences
    """
    try:
        cancelled = await cancel_stored(connection, queue, events, awaited, WHY_FAILED, created=created)
    except JetStreamProviderError as error:
        log.warning("The jobs of %s that haven't ended couldn't be cancelled: %s", queue, error)
    else:
        log.info("%d jobs of %s that hadn't ended are cancelled, since %s", cancelled, queue, WHY_FAILED)
