"""The trigger that waits for jobs to end."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.cancellation.cancel import cancel_stored
from airflow_provider_jetstream.jetstream.errors import ApiError, JobsStalledError, TerminalError, TransientError
from airflow_provider_jetstream.jetstream.publishing.advised_jobs import read_advised_jobs
from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
from airflow_provider_jetstream.jetstream.waiting.handle import JobsHandle
from airflow_provider_jetstream.jetstream.waiting.policy import StallPolicy, WaitPolicy
from airflow_provider_jetstream.jetstream.waiting.report import WaitReport, ranges_of, report_on
from airflow_provider_jetstream.jetstream.waiting.wait import wait
from airflow_provider_jetstream.tasks.arguments import check_flags, check_text
from airflow_provider_jetstream.tasks.trigger_arguments import check_times, check_wait_arguments
from airflow_provider_jetstream.triggers.early_fire_guard import EarlyFireGuard
from airflow_provider_jetstream.triggers.short_collections import SHORT_COLLECTIONS
from airflow_provider_jetstream.triggers.task_state import has_ended

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection

WHY_KILLED = "the task that waits for it was ended"
_RETRY_SECONDS = 2.0
_PROGRESS_SECONDS = 10.0
# Jobs may have ended in time while no triggerer ran, so a trigger reads the streams even after its deadline.
_MINIMUM_SECONDS = 5.0

# Airflow cancels a killed trigger once a second until it has ended, and so interrupts its on_kill.
_cancellations: set[asyncio.Task[None]] = set()


class JobCompletionTrigger(BaseTrigger):
    """Fires when jobs have ended, however they ended.

    Its whole state is in its arguments and on the server: after a restart, on another triggerer or as a second copy it
    reads the same stored events and fires the same event.

    :param nats_conn_id: the Airflow connection
    :param mark: the cursor to read from, as a dict; taken before the jobs were published
    :param sequences: the jobs' stream sequences as ranges of first and last
    :param tolerance: the arguments of a :class:`~airflow_provider_jetstream.jetstream.WaitPolicy`; the trigger fires
        early where the policy is violated
    :param deadline: seconds since the epoch after which it fires in any case
    :param deferred_at: seconds since the epoch at which the task deferred itself
    :param summary: part of the event, unchanged
    :param limited_by: the argument of the operator that sets the deadline
    :param stalls: the arguments ``reconcile`` and ``on_stall`` of :func:`~airflow_provider_jetstream.jetstream.wait`
    :param handle: the handle that names the jobs, in place of ``sequences`` and ``advised_by``
    :param cancel_on_kill: cancel the jobs that haven't ended when a person ends the task
    :param advised_by: the key of the task whose record says which jobs workers report on advisory subjects, if any
    """

    def __init__(
        self,
        *,
        nats_conn_id: str,
        mark: Mapping[str, Any],
        sequences: Sequence[Sequence[int]],
        tolerance: Mapping[str, int | None],
        deadline: float,
        deferred_at: float,
        summary: Mapping[str, Any],
        cancel_on_kill: bool = False,
        advised_by: str | None = None,
        limited_by: str = "wait_timeout",
        stalls: Mapping[str, Any] | None = None,
        handle: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        check_text(nats_conn_id=nats_conn_id)
        check_wait_arguments(mark, tolerance, sequences, summary)
        check_times(deadline=deadline, deferred_at=deferred_at)
        check_flags(cancel_on_kill=cancel_on_kill)
        self.nats_conn_id = nats_conn_id
        # Not the dict: its text isn't shared with the other triggers of the process.
        self._cursor = Cursor(**mark)
        self.sequences = [list(span) for span in sequences]
        self.tolerance = dict(tolerance)
        self.cancel_on_kill = cancel_on_kill
        self.advised_by = advised_by
        self.limited_by = limited_by
        self.stalls = dict(stalls or {})
        self.handle = dict(handle) if handle else None
        self.deadline = deadline
        self.deferred_at = deferred_at
        self.summary = dict(summary)
        # Of the jobs, once they are read: a million take longer than the other triggers should wait.
        self._report = WaitReport(set())
        self._is_read = False
        self._logged_at = time.monotonic()

    @property
    def mark(self) -> dict[str, Any]:
        """The cursor to read from, as a dict."""
        return {**asdict(self._cursor), "advisory_subjects": list(self._cursor.advisory_subjects)}

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class path and the arguments that recreate the trigger elsewhere; never a secret."""
        return (
            f"{type(self).__module__}.{type(self).__name__}",
            {
                "nats_conn_id": self.nats_conn_id,
                "mark": self.mark,
                "sequences": self.sequences,
                "tolerance": self.tolerance,
                "cancel_on_kill": self.cancel_on_kill,
                "advised_by": self.advised_by,
                "limited_by": self.limited_by,
                "stalls": self.stalls,
                "handle": self.handle,
                "deadline": self.deadline,
                "deferred_at": self.deferred_at,
                "summary": self.summary,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait, then fire one event with ``status`` ``ended``, ``timeout``, ``stalled`` or ``error``."""
        guard = EarlyFireGuard(self.deferred_at)
        try:
            if not self.handle:
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
        # In a thread, since each takes long for a million jobs.
        event |= {
            "queue": self._cursor.queue,
            "events": self._cursor.events,
            "created": self._cursor.created,
            "missing": await asyncio.to_thread(ranges_of, self._report.awaited),
            "report": await asyncio.to_thread(self._report.as_json),
            "summary": self.summary,
        }
        yield TriggerEvent(event)  # type: ignore[no-untyped-call]

    async def on_kill(self) -> None:
        """Cancel the jobs that haven't ended if ``cancel_on_kill`` is set and a person ended the task."""
        if self.cancel_on_kill and not self.handle:
            await self._read_jobs()
        if not self.cancel_on_kill or not self._report.awaited:
            return
        cancellation = asyncio.create_task(self._cancel_jobs())
        _cancellations.add(cancellation)
        cancellation.add_done_callback(_cancellations.discard)
        await asyncio.shield(cancellation)

    async def _cancel_jobs(self) -> None:
        if not await has_ended(self.task_instance):
            self.log.info("The task goes on, so its jobs do too")
            return
        async with JetStreamHook(self.nats_conn_id).shared() as connection:
            cancelled = await cancel_stored(
                *(connection, self._cursor.queue, self._cursor.events, self._report.awaited, WHY_KILLED),
                created=self._cursor.created,
            )
        self.log.info("The task was ended: %d jobs of %s are cancelled", cancelled, self._cursor.queue)

    async def _wait(self) -> None:
        cursor, policy = self._cursor, WaitPolicy(**self.tolerance)
        while True:
            try:
                async with JetStreamHook(self.nats_conn_id).shared() as connection:
                    # Before the wait begins: it makes the report of a handle's jobs.
                    advised = await self._advised(connection, cursor)
                    with SHORT_COLLECTIONS:
                        await wait(
                            connection,
                            cursor,
                            self._report,
                            policy=policy,
                            progress=self._log_progress,
                            advised=advised,
                            **asdict(StallPolicy(**self.stalls)),
                        )
            except JobsStalledError:
                raise
            except (TransientError, ApiError) as error:
                self.log.warning("Waiting for jobs was interrupted, trying again: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                return

    async def _advised(self, connection: Connection, cursor: Cursor) -> dict[str, int]:
        if self.handle:
            report, advised = await JobsHandle.of(self.handle).report(connection)
            self._note_jobs(report)
            return advised
        if self.advised_by is None:
            return {}
        return await read_advised_jobs(connection, cursor.events, cursor.queue, self.advised_by, cursor.created)

    async def _read_jobs(self) -> None:
        if not self._is_read:
            self._note_jobs(await report_on(self.sequences))

    def _note_jobs(self, report: WaitReport) -> None:
        if not self._is_read:
            self._report, self._is_read = report, True

    def _log_progress(self, report: WaitReport) -> None:
        if report.awaited and time.monotonic() - self._logged_at >= _PROGRESS_SECONDS:
            self._logged_at = time.monotonic()
            self.log.info(
                "%d completed, %d dead, %d to go", len(report.completed), len(report.dead), len(report.awaited)
            )
