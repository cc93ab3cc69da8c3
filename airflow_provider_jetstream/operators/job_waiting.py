"""The base class of operators that wait for jobs: first inline for a short time, then in a trigger."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import get_current_context

from airflow_provider_jetstream.airflow_compat import AirflowFailException, conf
from airflow_provider_jetstream.assets.task_assets import TaskAssets
from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.cancellation.cancel import cancel_stored
from airflow_provider_jetstream.jetstream.errors import (
    JetStreamProviderError,
    JobsStalledError,
    TerminalError,
)
from airflow_provider_jetstream.jetstream.publishing.report import sequence_ranges
from airflow_provider_jetstream.jetstream.waiting.handle import JobsHandle
from airflow_provider_jetstream.jetstream.waiting.wait import cancel_rest, wait, while_ends_are_near
from airflow_provider_jetstream.links.job_reports import JobReportsLink
from airflow_provider_jetstream.links.monitor import QueueLink, RunJobsLink, RunLettersLink
from airflow_provider_jetstream.operators.wait_arguments import WaitArguments
from airflow_provider_jetstream.tasks.arguments import check_flags, check_text
from airflow_provider_jetstream.tasks.deferral_limit import deferral_limit
from airflow_provider_jetstream.tasks.job_reports import (
    COUNTS,
    JOBS,
    bounded_result,
    checked_returns,
    deferred_wait,
    job_reports,
    plain_reports,
    push_job_reports,
    resumed_job_reports,
)
from airflow_provider_jetstream.tasks.outcome import fail_on_terminal_errors, json_result
from airflow_provider_jetstream.tasks.queue_source import declared_queue, load_queue
from airflow_provider_jetstream.tasks.wait_limits import WAIT_ARGUMENTS, refuse_limits_without_wait
from airflow_provider_jetstream.triggers.completion import WHY_KILLED, JobCompletionTrigger
from airflow_provider_jetstream.triggers.task_state import has_ended

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from airflow.sdk import BaseOperatorLink, Context

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import QueueSource, WorkQueue
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
    from airflow_provider_jetstream.jetstream.waiting.job_reports import JobIds, JobReports
    from airflow_provider_jetstream.jetstream.waiting.report import WaitReport
    from airflow_provider_jetstream.tasks.job_reports import TaskResult

# Beside the result in a trigger's event.
_WAIT = "wait"
_BACKSTOP = timedelta(minutes=2)


class JobWaitingOperator(TaskAssets, WaitArguments):
    """An operator that can wait until the jobs it published or redrove have ended.

    Its further arguments are those of :class:`~airflow_provider_jetstream.operators.wait_arguments.WaitArguments`.

    :param work_queue: the queue
    :param wait_for_completion: wait until every job ended
    :param returns: what the task returns once it has waited: ``counts``, or ``jobs`` for a list to map over: a report
        on each job where they are few, else parts of reports
    :param deferrable: wait in the triggerer rather than in a worker slot
    :param nats_conn_id: the Airflow connection
    """

    operator_extra_links: Collection[BaseOperatorLink] = (
        QueueLink(),
        RunJobsLink(),
        RunLettersLink(),
        JobReportsLink(),
    )
    # The arguments that mean nothing to a task that doesn't wait.
    limits_of_waiting: Sequence[str] = WAIT_ARGUMENTS

    def __init__(
        self,
        *,
        work_queue: QueueSource,
        wait_for_completion: bool = False,
        returns: str = COUNTS,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        nats_conn_id: str = JetStreamHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_text(nats_conn_id=nats_conn_id)
        check_flags(wait_for_completion=wait_for_completion, deferrable=deferrable)
        self._known_queue = self.known_queue(work_queue)
        self.work_queue = work_queue
        self.nats_conn_id = nats_conn_id
        self.wait_for_completion = wait_for_completion
        self._signal_kill: Callable[[], object] = _do_nothing
        self._wait_began: float | None = None
        self._job_count = 0
        self._job_reports: JobReports | None = None
        self._deferred_wait: dict[str, Any] | None = None
        self.returns = checked_returns(returns, wait_for_completion=wait_for_completion)
        self.deferrable = deferrable
        if not wait_for_completion:
            unused = (*self.limits_of_waiting, "cancel_on_kill", "cancel_on_failure")
            refuse_limits_without_wait({name: getattr(self, name) for name in unused})

    async def wait_inline(
        self, connection: Connection, handle: JobsHandle, names: JobIds | None = None
    ) -> WaitReport | JobsHandle:
        """Wait in this process: for ``defer_after`` if a trigger can take over, else to the end.

        :param handle: names the jobs, and the cursor from which their ends are read
        :param names: the ids under which the jobs were published, where they are known
        :return: the report, or the handle with which the trigger has to go on waiting
        :raises DeadlineError: ``wait_timeout`` is over and no trigger may go on waiting
        """
        cursor, (report, advised) = handle.cursor, await handle.report(connection)
        self._wait_began, self._job_count = time.monotonic(), len(report.awaited)
        limit = asyncio.timeout(self._time_limit.total_seconds())
        killed, loop = asyncio.Event(), asyncio.get_running_loop()
        # Airflow calls on_kill from a signal handler, which doesn't wake the loop by itself.
        self._signal_kill = partial(loop.call_soon_threadsafe, killed.set)
        stalls = asdict(self._stall_policy())
        waiting = asyncio.create_task(
            wait(connection, cursor, report, policy=self._policy(), advised=advised, **stalls)
        )
        kill = asyncio.create_task(killed.wait())
        hold = asyncio.create_task(self._hold(connection, cursor, report, limit))
        try:
            async with limit:
                while not waiting.done():
                    await asyncio.wait({waiting, kill}, return_when=asyncio.FIRST_COMPLETED)
                    if kill.done():
                        killed.clear()
                        kill = asyncio.create_task(killed.wait())
                        await self._cancel_jobs(connection, cursor, report)
                ended = await waiting
        except TimeoutError:
            if not limit.expired():
                raise
            if self.deferrable:
                self.log.info("Waiting in the triggerer for %d jobs of %s", len(report.awaited), cursor.queue)
                handle, self._deferred_wait = await deferred_wait(connection, handle, names)
                return handle
            await self._push_job_reports(connection, cursor, report, names)
            await self._cancel_rest(connection, cursor, report.awaited)
            raise self._overdue(cursor.queue, sequence_ranges(report.awaited)) from None
        except JetStreamProviderError as error:
            await self._push_job_reports(connection, cursor, report, names)
            await self._cancel_rest(connection, cursor, report.awaited, is_final=isinstance(error, TerminalError))
            raise
        else:
            if self._policy().violation(ended.as_json()):
                await self._cancel_rest(connection, cursor, ended.awaited, is_final=True)
            self._job_reports = await job_reports(connection, cursor, ended.as_json(), names)
            return ended
        finally:
            self._signal_kill = _do_nothing
            for task in (waiting, kill, hold):
                task.cancel()
            await asyncio.gather(waiting, kill, hold, return_exceptions=True)

    async def _hold(self, connection: Connection, cursor: Cursor, report: WaitReport, limit: asyncio.Timeout) -> None:
        """End the wait in this process when a trigger shall go on."""
        if not self.deferrable:
            return
        if (seconds := self._parsed_defer_after()) is None:
            # Jobs that end soon are awaited without deferring, which costs seconds; see docs/decisions.md.
            await while_ends_are_near(connection, cursor, report)
        else:
            await asyncio.sleep(seconds)
        if not limit.expired():
            limit.reschedule(asyncio.get_running_loop().time())

    async def _cancel_rest(
        self, connection: Connection, cursor: Cursor, awaited: Collection[int], *, is_final: bool = False
    ) -> None:
        """Cancel the jobs of a failed wait that haven't ended, unless a retry goes on waiting for them."""
        if self.cancel_on_failure and awaited and (is_final or _is_last_try()):
            await cancel_rest(connection, cursor, awaited)

    async def _cancel_missing(self, connection: Connection, handle: JobsHandle, event: Mapping[str, Any]) -> None:
        """Do the same for a wait that the trigger has ended."""
        if event["missing"] is None:
            # The server was away meanwhile.
            awaited = (await handle.report(connection))[0].awaited
        else:
            awaited = {number for low, high in event["missing"] for number in range(low, high + 1)}
        is_final = event["status"] in ("ended", "error")
        await self._cancel_rest(connection, handle.cursor, awaited, is_final=is_final)

    def on_kill(self) -> None:
        """Cancel the jobs that haven't ended if ``cancel_on_kill`` is set; called while :meth:`execute` runs."""
        self._signal_kill()

    async def _push_job_reports(
        self, connection: Connection, cursor: Cursor, report: WaitReport, names: JobIds | None
    ) -> None:
        reports = await job_reports(connection, cursor, report.as_json(), names)
        await asyncio.to_thread(push_job_reports, reports)

    async def _cancel_jobs(self, connection: Connection, cursor: Cursor, report: WaitReport) -> None:
        if not self.cancel_on_kill:
            return
        # Airflow also kills a task that was cleared, and one whose machine is shut down.
        if await has_ended(get_current_context()["ti"]):
            cancelled = await cancel_stored(
                *(connection, cursor.queue, cursor.events, report.awaited, WHY_KILLED), created=cursor.created
            )
            self.log.info("The task is being ended: %d jobs of %s are cancelled", cancelled, cursor.queue)
        else:
            self.log.info("The task goes on, so its jobs do too")

    def known_queue(self, work_queue: QueueSource) -> WorkQueue | None:
        """Return what is known of the queue when the DAG is parsed; ``None`` where only the task can know it.

        :raises QueueDeclarationError: it is no queue
        """
        return declared_queue(work_queue, self)

    def defer_waiting(self, handle: JobsHandle, summary: Mapping[str, Any]) -> NoReturn:
        """Go on waiting in the triggerer.

        :param handle: what :meth:`wait_inline` returned
        :param summary: becomes part of the task's result
        """
        now = time.time()
        waited = timedelta(seconds=time.monotonic() - (self._wait_began or time.monotonic()))
        limit = deferral_limit(self, max(timedelta(0), self._time_limit - waited), "wait_timeout")
        self.defer(
            trigger=JobCompletionTrigger(
                nats_conn_id=self.nats_conn_id,
                handle=handle,
                tolerance=asdict(self._policy()),
                deadline=now + limit.left.total_seconds(),
                limited_by=limit.argument,
                stalls=asdict(self._stall_policy()),
                deferred_at=now,
                summary={**summary, _WAIT: self._deferred_wait},
                cancel_on_kill=self.cancel_on_kill,
            ),
            method_name="execute_complete",
            # The trigger itself fires at the deadline and names the missing jobs; this only ends one that can't run.
            timeout=limit.left + _BACKSTOP,
        )

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None, **_: Any) -> TaskResult:
        """Resume after the trigger.

        :raises AirflowFailException: more jobs died, were cancelled or are unaccounted for than tolerated, or waiting
            was impossible
        :raises DeadlineError: jobs are still running after ``wait_timeout``, or after the ``execution_timeout``
        :raises JobsStalledError: no consumer delivers one of the jobs
        """
        if event is None:
            raise AirflowFailException("the trigger ended without an event; clear the task to go on waiting")
        summary, handle, hook = dict(event["summary"]), JobsHandle.of(event["handle"]), JetStreamHook(self.nats_conn_id)
        self._job_reports = resumed_job_reports(hook, handle.cursor, summary.pop(_WAIT, None), event["report"])
        if event["status"] != "ended":
            push_job_reports(self._job_reports)
        if self.cancel_on_failure and (event["status"] != "ended" or self._policy().violation(event["report"])):
            hook.blocking(self._cancel_missing, handle, event)
        if event["status"] == "error":
            raise AirflowFailException(event["message"])
        if event["status"] == "timeout":
            raise self._overdue(handle.cursor.queue, event["missing"], event.get("limited_by"))
        if event["status"] == "stalled":
            raise self._resumable(JobsStalledError, event["message"])
        return self.finish(summary, event["report"])

    def finish(self, summary: Mapping[str, Any], report: Mapping[str, Any]) -> TaskResult:
        """Turn the ends of the jobs into the outcome of the task, and store the reports on them as an XCom.

        :param summary: the result before waiting
        :param report: how the jobs ended, as JSON
        :return: both, or the reports on the jobs if ``returns`` says so
        :raises AirflowFailException: more jobs died, were cancelled or are unaccounted for than tolerated
        """
        self.note_work({**summary, **report})
        reports = self._job_reports or plain_reports(load_queue(self.work_queue, self).name, report, None, "not read")
        push_job_reports(reports)
        self.log.info(
            "%d jobs completed, %d became dead letters, %d were cancelled, %d are unaccounted for",
            report["completed"],
            report["dead"],
            report["cancelled"],
            report["unaccounted"],
        )
        if left_out := report.get("results_left_out"):
            self.log.warning("%d results are too large together for an XCom; the events stream has them", left_out)
        if error := self._policy().violation(report, reports.describe):
            raise AirflowFailException(f"{error.code} {error}")
        if self.returns == JOBS:
            with fail_on_terminal_errors():
                return reports.items()
        return json_result(bounded_result({**summary, **report}))


def _is_last_try() -> bool:
    instance = get_current_context()["ti"]
    return bool(instance.try_number > instance.max_tries)


def _do_nothing() -> None:
    pass
