"""The sensor that waits for jobs which another task, or another DAG, has published."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, overload

from airflow.sdk import PokeReturnValue

from airflow_provider_jetstream.airflow_compat import AirflowFailException, AirflowSensorTimeout, AirflowSkipException
from airflow_provider_jetstream.jetstream.errors import ArgumentError
from airflow_provider_jetstream.links.monitor import JobReportsLink
from airflow_provider_jetstream.operators.job_waiting import JobWaitingOperator
from airflow_provider_jetstream.sensors.polling import LimitedSensor
from airflow_provider_jetstream.tasks import runtime
from airflow_provider_jetstream.tasks.arguments import WAIT_ARGUMENTS, is_templated
from airflow_provider_jetstream.tasks.context import fail_on_terminal_errors
from airflow_provider_jetstream.tasks.hook import hook_for

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from airflow.sdk import BaseOperatorLink, Context
    from airflow.sdk.definitions.mappedoperator import OperatorPartial

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.waiting.handle import JobsHandle
    from airflow_provider_jetstream.jetstream.waiting.report import WaitReport
    from airflow_provider_jetstream.tasks.argument_types import (
        Count,
        Handle,
        JobsSensorArguments,
        JobsSensorOptions,
        TolerantJobsSensorOptions,
    )
    from airflow_provider_jetstream.tasks.job_reports import TaskResult

_TIMEOUT = "timeout"
# Jobs may have ended in time, so their ends are read also where no time is left.
_SHORTEST = 5.0


class JetStreamJobsSensor(JobWaitingOperator, LimitedSensor):
    """Succeed when jobs that were published elsewhere have ended.

    It waits for the jobs of a handle, and nothing else: not for jobs that others publish to the queue. What it reports
    is as with a task that waits for its own jobs. A task that is tried again or cleared goes on waiting.

    It ends as Airflow's sensors do: after ``timeout`` it fails and isn't tried again. With ``soft_fail`` it is skipped
    then, and also where the jobs ended otherwise than tolerated; it fails where they can't be awaited at all.

    In the mode ``poke`` it follows the ends of the jobs and so succeeds at once; it pauses for ``poke_interval`` only
    after an error with ``silent_fail``. In the mode ``reschedule`` each poke lasts while the jobs are about to end:
    too short to find that a job is gone without evidence (``defer_after="1m"`` does), or that no consumer delivers it.

    :param handle: the handle on the jobs, or what has it as ``handle``: the result of a publishing task, such as
        ``publish.output`` or ``"{{ ti.xcom_pull('publish') }}"``
    :param defer_after: how long a deferrable task waits on its worker slot before it defers, and how long a poke lasts
        in the mode ``reschedule``: a duration or seconds. Where absent, 2 to 12 seconds, for as long as the jobs are
        about to end
    :param wait_arguments: those of :class:`~airflow_provider_jetstream.operators.job_waiting.JobWaitingOperator`
    :param deferrable: wait in the triggerer rather than in a worker slot
    :param nats_conn_id: the Airflow connection
    :return: counts, sequences as ranges, and results
    """

    template_fields: Sequence[str] = (
        "handle",
        "nats_conn_id",
        *(name for name in WAIT_ARGUMENTS if name != "wait_timeout"),
    )
    operator_extra_links: Collection[BaseOperatorLink] = (JobReportsLink(),)
    template_fields_renderers: ClassVar[dict[str, str]] = {"handle": "json"}
    ui_color = "#d9ecf5"
    time_limit = _TIMEOUT
    # How much of the time limit is left for this poke.
    _seconds_left: float | None = None
    _first_poke: float | None = None

    if TYPE_CHECKING:

        @classmethod
        def partial(
            cls,
            *,
            task_id: str,
            handle: Handle = ...,
            min_completed: Count | None = ...,
            **options: Unpack[TolerantJobsSensorOptions],
        ) -> OperatorPartial:
            """Begin a mapped task."""
            ...

    @overload
    def __init__(self, *, task_id: str, handle: Handle, **options: Unpack[TolerantJobsSensorOptions]) -> None: ...

    @overload
    def __init__(
        self, *, task_id: str, handle: Handle, min_completed: Count, **options: Unpack[JobsSensorOptions]
    ) -> None: ...

    def __init__(self, *, handle: Handle, **wait_arguments: Unpack[JobsSensorArguments]) -> None:
        # The next class is the base of waiting tasks, whose arguments for Airflow go on to Airflow's sensor.
        super().__init__(**wait_arguments)  # type: ignore[misc]
        if self.cancel_on_kill and self.reschedule and not self.deferrable:
            raise ArgumentError(
                "expected no cancel_on_kill with mode='reschedule', found it: between two pokes nothing runs that could"
                " cancel the jobs; set deferrable=True or mode='poke', or leave cancel_on_kill out"
            )
        self.handle: Any = handle
        if not is_templated(handle):
            self.handle = runtime.JobsHandle.of(handle).as_json()

    @property
    def wait_timeout(self) -> timedelta:
        """How long to wait from now on."""
        seconds = self.timeout if self._seconds_left is None else self._seconds_left
        return timedelta(seconds=max(seconds, _SHORTEST))

    def leaves_early(self) -> bool:
        """Return whether the wait in this process ends before the jobs do."""
        left = self._seconds_left
        return self.deferrable or (self.reschedule and left is not None and left > _SHORTEST)

    def execute(self, context: Context) -> Any:
        """Wait until the jobs have ended.

        :raises AirflowFailException: there is no handle, or more jobs died, were cancelled or are unaccounted for
            than tolerated
        :raises AirflowSensorTimeout: jobs are still running after ``timeout``
        :raises JobsStalledError: no consumer delivers one of the jobs
        """
        with self.skipping():
            if not self.deferrable:
                return super().execute(context)
            with fail_on_terminal_errors():
                handle = self._parsed_handle()
            try:
                with fail_on_terminal_errors():
                    ends = hook_for(self.nats_conn_id).blocking(self._wait, handle)
            except Exception as error:
                if not self.goes_on_after(error):
                    raise
                ends = handle
            summary = self._summary(handle)
            if isinstance(ends, runtime.JobsHandle):
                self.defer_waiting(ends, summary)
            return self.finish(summary, ends.as_json())

    def poke(self, context: Context) -> PokeReturnValue:
        """Wait for the jobs as long as the mode lets a poke last.

        :raises AirflowFailException: there is no handle, or more jobs died, were cancelled or are unaccounted for
            than tolerated
        :raises AirflowSensorTimeout: jobs are still running after ``timeout``
        """
        self._seconds_left = self.timeout - self._seconds_since_first_poke(context)
        with fail_on_terminal_errors():
            handle = self._parsed_handle()
            ends = hook_for(self.nats_conn_id).blocking(self._wait, handle)
        if isinstance(ends, runtime.JobsHandle):
            return PokeReturnValue(is_done=False)
        return PokeReturnValue(is_done=True, xcom_value=self.finish(self._summary(handle), ends.as_json()))

    def finish(self, summary: Mapping[str, Any], report: Mapping[str, Any]) -> TaskResult:
        """Turn the ends of the jobs into the outcome of the task, and store the reports on them as an XCom.

        :raises AirflowFailException: more jobs died, were cancelled or are unaccounted for than tolerated
        :raises AirflowSkipException: the same with ``soft_fail``
        """
        try:
            return super().finish(summary, report)
        except AirflowFailException as error:
            if self.soft_fail:
                raise AirflowSkipException(f"{error}; skipping due to soft_fail") from None
            raise

    def whole_limit(self) -> timedelta:
        """Return the time limit as it was given."""
        return timedelta(seconds=self.timeout)

    def overdue_error(self, message: str, argument: str) -> Exception:
        """Return the error of a wait whose time is over."""
        if argument != _TIMEOUT:
            return super().overdue_error(message, argument)
        return AirflowSensorTimeout(f"{message}; a task that is cleared goes on waiting")

    def _parsed_handle(self) -> JobsHandle:
        self._limits(), self._parsed_defer_after()
        return runtime.JobsHandle.of(self.handle)

    def _summary(self, handle: JobsHandle) -> dict[str, Any]:
        return {"stream": handle.cursor.queue, "jobs": self._job_count}

    def _seconds_since_first_poke(self, context: Context) -> float:
        if self.reschedule:
            began = context["ti"].get_first_reschedule_date(context)
            return (datetime.now(UTC) - began).total_seconds() if began else 0.0
        self._first_poke = self._first_poke or time.monotonic()
        return time.monotonic() - self._first_poke

    async def _wait(self, connection: Connection, handle: JobsHandle) -> WaitReport | JobsHandle:
        now = handle.model_copy(update={"cursor": await handle.cursor_now(connection)})
        return await self.wait_inline(connection, now)
