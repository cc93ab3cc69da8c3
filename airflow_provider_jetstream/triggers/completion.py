"""The trigger that waits for jobs to end."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_provider_jetstream.jetstream.errors import ApiError, JobsStalledError, TerminalError, TransientError
from airflow_provider_jetstream.jetstream.waiting.policy import StallPolicy, WaitPolicy
from airflow_provider_jetstream.tasks import runtime
from airflow_provider_jetstream.tasks.arguments import check_flags, check_mapping, check_text, check_times
from airflow_provider_jetstream.tasks.hook import hook_for
from airflow_provider_jetstream.tasks.job_reports import LoggedProgress
from airflow_provider_jetstream.triggers.triggerer import SHORT_COLLECTIONS, WHY_KILLED, EarlyFireGuard, has_ended

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.waiting.handle import JobsHandle
    from airflow_provider_jetstream.jetstream.waiting.report import WaitReport

_RETRY_SECONDS = 2.0
# Jobs may have ended in time while no triggerer ran, so a trigger reads the streams even after its deadline.
_MINIMUM_SECONDS = 5.0

_Policy = TypeVar("_Policy", WaitPolicy, StallPolicy)

# Airflow cancels a killed trigger once a second until it has ended, and so interrupts its on_kill.
_cancellations: set[asyncio.Task[None]] = set()


@lru_cache(maxsize=256)
def _one_of_equal(policy: _Policy) -> _Policy:
    return policy


class JobCompletionTrigger(BaseTrigger):
    """Fires when jobs have ended, however they ended.

    Its whole state is in its arguments and on the server: after a restart, on another triggerer or as a second copy it
    reads the same stored events and fires the same event.

    :param nats_conn_id: the Airflow connection
    :param handle: the handle on the jobs, see :class:`~airflow_provider_jetstream.jetstream.JobsHandle`, or its JSON
    :param tolerance: the arguments of a :class:`~airflow_provider_jetstream.jetstream.WaitPolicy`; the trigger fires
        early where the policy is violated
    :param deadline: seconds since the epoch after which it fires in any case
    :param deferred_at: seconds since the epoch at which the task deferred itself
    :param summary: part of the event, unchanged
    :param cancel_on_kill: cancel the jobs that haven't ended when a person ends the task
    :param limited_by: the argument of the operator that sets the deadline
    :param stalls: the arguments ``reconcile`` and ``on_stall`` of :func:`~airflow_provider_jetstream.jetstream.wait`
    """

    def __init__(
        self,
        *,
        nats_conn_id: str,
        handle: JobsHandle | Mapping[str, Any],
        tolerance: Mapping[str, int | None],
        deadline: float,
        deferred_at: float,
        summary: Mapping[str, Any],
        cancel_on_kill: bool = False,
        limited_by: str = "wait_timeout",
        stalls: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        check_text(nats_conn_id=nats_conn_id)
        check_mapping(tolerance=tolerance, summary=summary, stalls={} if stalls is None else stalls)
        check_times(deadline=deadline, deferred_at=deferred_at)
        check_flags(cancel_on_kill=cancel_on_kill)
        self.nats_conn_id = nats_conn_id
        # Not as JSON: ten thousand triggers of a process have the same few names in theirs, and equal policies.
        self.handle = runtime.JobsHandle.of(handle).compact()
        self.policy = _one_of_equal(WaitPolicy(**tolerance))
        self.stall_policy = _one_of_equal(StallPolicy(**stalls or {}))
        self.cancel_on_kill = cancel_on_kill
        self.limited_by = limited_by
        self.deadline = deadline
        self.deferred_at = deferred_at
        self.summary = dict(summary)
        # Of the jobs, once they are read: a million take longer than the other triggers should wait.
        self._report: WaitReport | None = None
        self._advised: Mapping[str, int] = self.handle.advised

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class path and the arguments that recreate the trigger elsewhere; never a secret."""
        return (
            f"{type(self).__module__}.{type(self).__name__}",
            {
                "nats_conn_id": self.nats_conn_id,
                "handle": self.handle.as_json(),
                "tolerance": asdict(self.policy),
                "cancel_on_kill": self.cancel_on_kill,
                "limited_by": self.limited_by,
                "stalls": asdict(self.stall_policy),
                "deadline": self.deadline,
                "deferred_at": self.deferred_at,
                "summary": self.summary,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait, then fire one event with ``status`` ``ended``, ``timeout``, ``stalled`` or ``error``."""
        guard = EarlyFireGuard(self.deferred_at)
        try:
            if not self.handle.parts:
                # Also where the server is away until the deadline.
                await self._read_jobs()
            async with asyncio.timeout(max(_MINIMUM_SECONDS, self.deadline - time.time())):
                await self._wait()
            event: dict[str, Any] = {"status": "ended"}
        except TimeoutError:
            event = {"status": "timeout", "limited_by": self.limited_by}
        except JobsStalledError as error:
            event = {"status": "stalled", "message": str(error)}
        except TerminalError as error:
            event = {"status": "error", "message": f"{error.code} {error}"}
        await guard.wait()
        report = self._report or runtime.WaitReport(set())
        # In a thread, since it takes long for a million jobs.
        ended = await asyncio.to_thread(report.as_json)
        # Nothing where the server was away until the deadline, so that the jobs of the handle couldn't be read.
        event["missing"] = ended["details"]["awaited"] if self._report else None
        event |= {"handle": self.handle.as_json(), "report": ended, "summary": self.summary}
        yield TriggerEvent(event)  # type: ignore[no-untyped-call]

    async def on_kill(self) -> None:
        """Cancel the jobs that haven't ended if ``cancel_on_kill`` is set and a person ended the task."""
        if not self.cancel_on_kill or (self._report and not self._report.awaited):
            return
        cancellation = asyncio.create_task(self._cancel_jobs())
        _cancellations.add(cancellation)
        cancellation.add_done_callback(_cancellations.discard)
        await asyncio.shield(cancellation)

    async def _cancel_jobs(self) -> None:
        if not await has_ended(self.task_instance):
            self.log.info("The task goes on, so its jobs do too")
            return
        cursor = self.handle.cursor
        async with hook_for(self.nats_conn_id).shared() as connection:
            report, _ = await self._read_jobs(connection)
            cancelled = await runtime.cancel_stored(
                *(connection, cursor.queue, cursor.events, report.awaited, WHY_KILLED), created=cursor.created
            )
        self.log.info("The task was ended: %d jobs of %s are cancelled", cancelled, cursor.queue)

    async def _wait(self) -> None:
        while True:
            try:
                async with hook_for(self.nats_conn_id).shared() as connection:
                    report, advised = await self._read_jobs(connection)
                    # Its modules are imported before what is allocated is left out of collections.
                    wait = runtime.wait
                    with SHORT_COLLECTIONS, LoggedProgress(self.log, report, SHORT_COLLECTIONS.waits):
                        await wait(
                            connection,
                            self.handle.cursor,
                            report,
                            policy=self.policy,
                            advised=advised,
                            **asdict(self.stall_policy),
                        )
            except (TransientError, ApiError) as error:
                if isinstance(error, JobsStalledError):
                    raise
                self.log.warning("Waiting for jobs was interrupted, trying again: %s %s", error.code, error)
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                return

    async def _read_jobs(self, connection: Connection | None = None) -> tuple[WaitReport, Mapping[str, int]]:
        """Return the report on the jobs as far as they have ended, and those of them that workers report."""
        if self._report is None:
            found, advised = await self.handle.report(connection)
            self._report, self._advised = self._report or found, advised
        return self._report, self._advised
