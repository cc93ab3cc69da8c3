"""The base classes of tasks that wait for jobs: first inline for a short time, then in a trigger."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, Unpack

from airflow.sdk import BaseOperator, get_current_context

from airflow_provider_jetstream.airflow_compat import AirflowFailException, AirflowSensorTimeout, conf
from airflow_provider_jetstream.assets.stream_asset import TaskAssets
from airflow_provider_jetstream.jetstream.errors import (
    ArgumentError,
    DeadlineError,
    JetStreamProviderError,
    JobsStalledError,
    TerminalError,
)
from airflow_provider_jetstream.jetstream.waiting.policy import FAIL
from airflow_provider_jetstream.links.monitor import JobReportsLink, QueueLink, TaskJobsLink, TaskLettersLink
from airflow_provider_jetstream.tasks import runtime
from airflow_provider_jetstream.tasks.arguments import (
    DEFAULT_CONN_ID,
    DEFAULT_RECONCILE,
    DEFAULT_WAIT,
    WAIT_ARGUMENTS,
    WAIT_FIELDS,
    check_flags,
    check_text,
    check_wait_limits,
    is_templated,
    parse_span,
    parse_wait_limits,
    refuse_limits_without_wait,
)
from airflow_provider_jetstream.tasks.context import (
    EXECUTION_TIMEOUT,
    NamedMissingValues,
    deferral_limit,
    fail_on_terminal_errors,
    json_result,
)
from airflow_provider_jetstream.tasks.hook import hook_for
from airflow_provider_jetstream.tasks.job_reports import (
    LoggedProgress,
    bounded_result,
    deferred_wait,
    job_reports,
    push_job_reports,
    resumed_job_reports,
)
from airflow_provider_jetstream.tasks.queue_source import declared_queue

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from airflow.sdk import BaseOperatorLink, Context

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
    from airflow_provider_jetstream.jetstream.waiting.handle import JobsHandle
    from airflow_provider_jetstream.jetstream.waiting.job_reports import JobIds, JobReports
    from airflow_provider_jetstream.jetstream.waiting.report import WaitReport
    from airflow_provider_jetstream.tasks.argument_types import (
        Count,
        Duration,
        Queue,
        Returns,
        TaskArguments,
        Text,
        WaitArguments,
    )
    from airflow_provider_jetstream.tasks.arguments import WaitLimits
    from airflow_provider_jetstream.tasks.job_reports import TaskResult

COUNTS: Final = "counts"
JOBS: Final = "jobs"
# Beside the result in a trigger's event.
_WAIT = "wait"
_BACKSTOP = timedelta(minutes=2)
_NAMED_RANGES = 5
_LOGGED_HANDLE = 2_000
_GOES_ON = "a retry goes on waiting"


class JobWaitingOperator(NamedMissingValues, BaseOperator):
    """A task that waits until jobs have ended.

    :param max_dead: dead letters to tolerate; ``None`` for any number
    :param max_cancelled: cancelled jobs to tolerate; ``None`` for any number
    :param max_unaccounted: jobs to tolerate that are gone without evidence of how they ended; ``None`` for any number
    :param min_completed: how many jobs have to complete, 1 for any of them, however the others end; not together with
        the three above
    :param cancel_on_kill: cancel the jobs that haven't ended when a person ends the task
    :param cancel_on_failure: cancel the jobs that haven't ended when the wait fails and no retry goes on waiting
    :param reconcile: how long the queue has to be gone, or a job without a consumer that delivers it, until the task
        says so
    :param on_stall: ``fail`` to end the task then, with a retry that goes on waiting where the jobs are still stored;
        ``wait`` to go on with a warning
    :param defer_after: how long a deferrable task waits on its worker slot before it defers, which costs about ten
        seconds: a duration or seconds. Where absent, 2 to 12 seconds, for as long as the jobs are about to end
    :param returns: what the task returns once it has waited: ``counts``, or ``jobs`` for a list to map over: a report
        on each job where they are few, else parts of reports
    :param deferrable: wait in the triggerer rather than in a worker slot
    :param nats_conn_id: the Airflow connection
    """

    # The argument that limits the wait; each class has its value as wait_timeout.
    time_limit = "wait_timeout"
    wait_timeout: Any
    _job_reports: JobReports

    def __init__(
        self,
        *,
        max_dead: Count | None = 0,
        max_cancelled: Count | None = 0,
        max_unaccounted: Count | None = 0,
        min_completed: Count | None = None,
        cancel_on_kill: bool = False,
        cancel_on_failure: bool = False,
        reconcile: Duration = DEFAULT_RECONCILE,
        on_stall: Text = FAIL,
        defer_after: Duration | None = None,
        returns: Returns = COUNTS,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        nats_conn_id: str = DEFAULT_CONN_ID,
        **kwargs: Unpack[TaskArguments],
    ) -> None:
        super().__init__(**kwargs)
        check_text(nats_conn_id=nats_conn_id)
        check_flags(deferrable=deferrable, cancel_on_kill=cancel_on_kill, cancel_on_failure=cancel_on_failure)
        self.max_dead = max_dead
        self.max_cancelled = max_cancelled
        self.max_unaccounted = max_unaccounted
        self.min_completed = min_completed
        self.cancel_on_kill = cancel_on_kill
        self.cancel_on_failure = cancel_on_failure
        self.reconcile = reconcile
        self.on_stall = on_stall
        self.defer_after = defer_after
        self.returns = returns
        self.deferrable = deferrable
        self.nats_conn_id = nats_conn_id
        self._has_defer_after = defer_after is not None
        self._signal_kill: Callable[[], object] = _do_nothing
        self._wait_began: float | None = None
        self._job_count = 0
        self._deferred_wait: dict[str, Any] | None = None
        if not is_templated(defer_after):
            self._parsed_defer_after()
        if returns not in (COUNTS, JOBS):
            raise ArgumentError(f"expected returns to be {COUNTS!r} or {JOBS!r}, found {returns!r}: choose one of them")
        limits = {name: getattr(self, name) for name in WAIT_FIELDS}
        check_wait_limits(limits)
        self._numbers = tuple(name for name, value in limits.items() if value is not None)

    def _limits(self) -> WaitLimits:
        """Parse the limits of the wait, which may have been templates."""
        return parse_wait_limits({name: getattr(self, name) for name in WAIT_FIELDS}, self._numbers)

    def _parsed_defer_after(self) -> float | None:
        return parse_span("defer_after", self.defer_after).total_seconds() if self._has_defer_after else None

    async def wait_inline(
        self, connection: Connection, handle: JobsHandle, names: JobIds | None = None
    ) -> WaitReport | JobsHandle:
        """Wait in this process: for ``defer_after`` if a trigger can take over, else to the end.

        :param handle: names the jobs, and the cursor from which their ends are read
        :param names: the ids under which the jobs were published, where they are known
        :return: the report, or the handle with which the trigger, or a later poke, has to go on waiting
        :raises DeadlineError: the time limit is over and no trigger may go on waiting
        """
        cursor, (report, advised), limits = handle.cursor, await handle.report(connection), self._limits()
        self._wait_began, self._job_count = time.monotonic(), len(report.awaited)
        self._log_wait(handle, limits.timeout)
        limit = asyncio.timeout(limits.timeout.total_seconds())
        killed, loop = asyncio.Event(), asyncio.get_running_loop()
        # Airflow calls on_kill from a signal handler, which doesn't wake the loop by itself.
        self._signal_kill = partial(loop.call_soon_threadsafe, killed.set)
        waiting = asyncio.create_task(
            runtime.wait(connection, cursor, report, policy=limits.policy, advised=advised, **asdict(limits.stalls))
        )
        kill = asyncio.create_task(killed.wait())
        hold = asyncio.create_task(self._hold(connection, cursor, report, limit))
        try:
            async with limit:
                with LoggedProgress(self.log, report):
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
            if self.deferrable or hold.done():
                return await self._left(connection, handle, report, names)
            await self._push_job_reports(connection, cursor, report, names)
            overdue = self._overdue(cursor.queue, runtime.sequence_ranges(report.awaited))
            await self._cancel_rest(connection, cursor, report.awaited, is_final=_ends_the_task(overdue))
            raise overdue from None
        except JetStreamProviderError as error:
            await self._push_job_reports(connection, cursor, report, names)
            await self._cancel_rest(connection, cursor, report.awaited, is_final=isinstance(error, TerminalError))
            raise
        else:
            if limits.policy.violation(ended.as_json()):
                await self._cancel_rest(connection, cursor, ended.awaited, is_final=True)
            self._job_reports = await job_reports(connection, cursor, ended.as_json(), names)
            return ended
        finally:
            self._signal_kill = _do_nothing
            for task in (waiting, kill, hold):
                task.cancel()
            await asyncio.gather(waiting, kill, hold, return_exceptions=True)

    def _log_wait(self, handle: JobsHandle, timeout: timedelta) -> None:
        """Log what is awaited before the wait begins: a task that is killed leaves nothing but its log."""
        text = json.dumps(handle.as_json())
        known_by = f"the handle {text}" if len(text) <= _LOGGED_HANDLE else "a handle that is too long for this line"
        self.log.info(
            "Waiting for %d jobs of %s (%s) for %s at most; another task can wait for them by %s",
            *(self._job_count, handle.cursor.queue, _named_sequences(handle.sequences), timeout, known_by),
        )

    async def _left(
        self, connection: Connection, handle: JobsHandle, report: WaitReport, names: JobIds | None
    ) -> JobsHandle:
        """Return the handle with which the wait goes on elsewhere."""
        if self.deferrable:
            self.log.info("Waiting in the triggerer for %d jobs of %s", len(report.awaited), handle.cursor.queue)
            handle, self._deferred_wait = await deferred_wait(connection, handle, names)
        return handle

    async def _hold(self, connection: Connection, cursor: Cursor, report: WaitReport, limit: asyncio.Timeout) -> None:
        """End the wait in this process when a trigger, or a later poke, shall go on."""
        if not self.leaves_early():
            await asyncio.Event().wait()
        if (seconds := self._parsed_defer_after()) is None:
            # Jobs that end soon are awaited without deferring, which costs seconds; see docs/decisions.md.
            await runtime.while_ends_are_near(connection, cursor, report)
        else:
            await asyncio.sleep(seconds)
        if not self.deferrable:
            # What a poke hasn't read, the next one would have to read anew.
            await runtime.stored_ends_are_read(connection, cursor, self._job_count)
        if not limit.expired() and not self._limits().policy.is_finished(report):
            limit.reschedule(asyncio.get_running_loop().time())

    async def _cancel_rest(
        self, connection: Connection, cursor: Cursor, awaited: Collection[int], *, is_final: bool = False
    ) -> None:
        """Cancel the jobs of a failed wait that haven't ended, unless a retry goes on waiting for them."""
        if self.cancel_on_failure and awaited and (is_final or _is_last_try()):
            await runtime.cancel_rest(connection, cursor, awaited)

    async def _cancel_missing(
        self, connection: Connection, handle: JobsHandle, missing: Sequence[Sequence[int]] | None, *, is_final: bool
    ) -> None:
        """Do the same for a wait that the trigger has ended."""
        if missing is None:
            # The server was away meanwhile.
            awaited = (await handle.report(connection))[0].awaited
        else:
            awaited = {number for low, high in missing for number in range(low, high + 1)}
        await self._cancel_rest(connection, handle.cursor, awaited, is_final=is_final)

    def leaves_early(self) -> bool:
        """Return whether the wait in this process ends before the jobs do."""
        return self.deferrable

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
        if await runtime.has_ended(get_current_context()["ti"]):
            cancelled = await runtime.cancel_stored(
                *(connection, cursor.queue, cursor.events, report.awaited, runtime.WHY_KILLED), created=cursor.created
            )
            self.log.info("The task is being ended: %d jobs of %s are cancelled", cancelled, cursor.queue)
        else:
            self.log.info("The task goes on, so its jobs do too")

    def defer_waiting(self, handle: JobsHandle, summary: Mapping[str, Any]) -> NoReturn:
        """Go on waiting in the triggerer.

        :param handle: what :meth:`wait_inline` returned
        :param summary: becomes part of the task's result
        """
        # Only a task that defers needs the trigger.
        from airflow_provider_jetstream.triggers.completion import JobCompletionTrigger

        now, limits = time.time(), self._limits()
        waited = timedelta(seconds=time.monotonic() - (self._wait_began or time.monotonic()))
        limit = deferral_limit(self, max(timedelta(0), limits.timeout - waited), self.time_limit)
        self.defer(
            trigger=JobCompletionTrigger(
                nats_conn_id=self.nats_conn_id,
                handle=handle,
                tolerance=asdict(limits.policy),
                deadline=now + limit.left.total_seconds(),
                limited_by=limit.argument,
                stalls=asdict(limits.stalls),
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
        with fail_on_terminal_errors():
            return self._resume(event)

    def _resume(self, event: Mapping[str, Any]) -> TaskResult:
        summary, handle, hook = (
            dict(event["summary"]),
            runtime.JobsHandle.of(event["handle"]),
            hook_for(self.nats_conn_id),
        )
        self._job_reports = resumed_job_reports(hook, handle.cursor, summary.pop(_WAIT, None), event["report"])
        if event["status"] != "ended":
            push_job_reports(self._job_reports)
        failure: Exception | None = None
        if event["status"] == "error":
            failure = AirflowFailException(event["message"])
        elif event["status"] == "timeout":
            failure = self._overdue(handle.cursor.queue, event["missing"], event.get("limited_by"))
        elif event["status"] == "stalled":
            failure = JobsStalledError(f"{event['message']}; {_GOES_ON}")
        if self.cancel_on_failure and (failure or self._limits().policy.violation(event["report"])):
            is_final = failure is None or _ends_the_task(failure)
            hook.blocking(self._cancel_missing, handle, event["missing"], is_final=is_final)
        if failure:
            raise failure
        return self.finish(summary, event["report"])

    def finish(self, summary: Mapping[str, Any], report: Mapping[str, Any]) -> TaskResult:
        """Turn the ends of the jobs into the outcome of the task, and store the reports on them as an XCom.

        :param summary: the result before waiting
        :param report: how the jobs ended, as JSON
        :return: both, or the reports on the jobs if ``returns`` says so
        :raises AirflowFailException: more jobs died, were cancelled or are unaccounted for than tolerated
        """
        reports = self._job_reports
        push_job_reports(reports)
        self.log.info(
            "%d jobs completed, %d became dead letters, %d were cancelled, %d are unaccounted for",
            *(report[state] for state in ("completed", "dead", "cancelled", "unaccounted")),
        )
        if left_out := report.get("results_left_out"):
            self.log.warning("%d results are too large together for an XCom; the events stream has them", left_out)
        if error := self._limits().policy.violation(report, reports.describe):
            raise AirflowFailException(f"{error.code} {error}")
        if self.returns == JOBS:
            with fail_on_terminal_errors():
                return reports.items()
        return json_result(bounded_result({**summary, **report}))

    def _overdue(self, queue: str, missing: Sequence[Sequence[int]] | None, limited_by: str | None = None) -> Exception:
        found = f"that {queue} couldn't be read meanwhile: see whether the server was away"
        if missing is not None:
            count = sum(high - low + 1 for low, high in missing)
            found = f"{count} of {queue} that did not ({_named_sequences(missing)}): see whether workers take them"
        limit, argument = f"{self.whole_limit()}", self.time_limit
        if limited_by == EXECUTION_TIMEOUT:
            limit, argument = f"the execution_timeout of {self.execution_timeout}", EXECUTION_TIMEOUT
        message = f"expected every job to end within {limit}, found {found}, or raise {argument}"
        return self.overdue_error(message, argument)

    def whole_limit(self) -> timedelta:
        """Return the time limit as it was given."""
        return self._limits().timeout

    def overdue_error(self, message: str, argument: str) -> Exception:
        """Return the error of a wait whose time is over.

        :param argument: the one that has limited it
        """
        return DeadlineError(f"{message}; {_GOES_ON}")


class JobMakingOperator(TaskAssets, JobWaitingOperator):
    """An operator that can wait until the jobs that it has published or redriven have ended.

    :param work_queue: the queue
    :param wait_for_completion: wait until every job ended
    :param wait_timeout: how long to wait: a duration or seconds
    """

    operator_extra_links: Collection[BaseOperatorLink] = (
        QueueLink(),
        TaskJobsLink(),
        TaskLettersLink(),
        JobReportsLink(),
    )
    # The arguments that mean nothing to a task that doesn't wait.
    limits_of_waiting: Sequence[str] = WAIT_ARGUMENTS

    def __init__(
        self,
        *,
        work_queue: Queue,
        wait_for_completion: bool = False,
        wait_timeout: Duration = DEFAULT_WAIT,
        **kwargs: Unpack[WaitArguments],
    ) -> None:
        self.wait_timeout = wait_timeout
        super().__init__(**kwargs)
        check_flags(wait_for_completion=wait_for_completion)
        self._known_queue = self.known_queue(work_queue)
        self.work_queue = work_queue
        self.wait_for_completion = wait_for_completion
        if wait_for_completion:
            return
        if self.returns == JOBS:
            raise ArgumentError(
                f"expected wait_for_completion=True with returns={JOBS!r}, found a task that doesn't wait, and so can't"
                " report what became of its jobs: set it, or leave returns out"
            )
        unused = (*self.limits_of_waiting, "cancel_on_kill", "cancel_on_failure")
        refuse_limits_without_wait({name: getattr(self, name) for name in unused})

    def known_queue(self, work_queue: Queue) -> WorkQueue | None:
        """Return what is known of the queue when the DAG is parsed; ``None`` where only the task can know it.

        :raises QueueDeclarationError: it is no queue
        """
        return declared_queue(work_queue, self)

    def finish(self, summary: Mapping[str, Any], report: Mapping[str, Any]) -> TaskResult:
        """Turn the ends of the jobs into the outcome of the task, and say it in the events of its outlets.

        :raises AirflowFailException: more jobs died, were cancelled or are unaccounted for than tolerated
        """
        self.note_work({**summary, **report})
        return super().finish(summary, report)


def _named_sequences(ranges: Sequence[Sequence[int]]) -> str:
    named = ", ".join(f"{low}-{high}" if low != high else str(low) for low, high in ranges[:_NAMED_RANGES])
    return f"sequences {named or 'none'}{', …' if len(ranges) > _NAMED_RANGES else ''}"


def _ends_the_task(error: Exception) -> bool:
    """Return whether Airflow doesn't try a task again that raises an error."""
    return isinstance(error, AirflowFailException | AirflowSensorTimeout)


def _is_last_try() -> bool:
    instance = get_current_context()["ti"]
    return bool(instance.try_number > instance.max_tries)


def _do_nothing() -> None:
    pass
