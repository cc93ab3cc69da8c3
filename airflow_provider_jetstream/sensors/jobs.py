"""The sensor that waits for jobs which another task, or another DAG, has published."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from airflow_provider_jetstream.airflow_compat import conf
from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.links.monitor import JobReportsLink
from airflow_provider_jetstream.operators.job_waiting import JobWaitingOperator
from airflow_provider_jetstream.tasks import runtime
from airflow_provider_jetstream.tasks.arguments import WAIT_ARGUMENTS, is_templated
from airflow_provider_jetstream.tasks.context import fail_on_terminal_errors

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from airflow.sdk import BaseOperatorLink, Context

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import QueueSource, WorkQueue
    from airflow_provider_jetstream.jetstream.waiting.handle import JobsHandle
    from airflow_provider_jetstream.jetstream.waiting.report import WaitReport


class JetStreamJobsSensor(JobWaitingOperator):
    """Succeed when jobs that were published elsewhere have ended.

    It waits for the jobs of a handle, and nothing else: not for jobs that others publish to the queue. What it reports,
    and how it fails, is as with a task that waits for its own jobs. A retry goes on waiting.

    :param handle: the handle on the jobs, or what has it as ``handle``: the result of a publishing task, such as
        ``publish.output`` or ``"{{ ti.xcom_pull('publish') }}"``
    :param wait_arguments: those of :class:`~airflow_provider_jetstream.operators.job_waiting.JobWaitingOperator`
    :param deferrable: wait in the triggerer rather than in a worker slot
    :param nats_conn_id: the Airflow connection
    :return: counts, sequences as ranges, and results
    """

    template_fields: Sequence[str] = ("handle", "nats_conn_id", *WAIT_ARGUMENTS)
    operator_extra_links: Collection[BaseOperatorLink] = (JobReportsLink(),)
    template_fields_renderers: ClassVar[dict[str, str]] = {"handle": "json"}
    ui_color = "#d9ecf5"

    def __init__(
        self,
        *,
        handle: Any,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **wait_arguments: Any,
    ) -> None:
        super().__init__(work_queue="", wait_for_completion=True, deferrable=deferrable, **wait_arguments)
        self.handle = handle
        if not is_templated(handle):
            self.handle = runtime.JobsHandle.of(handle).as_json()

    def known_queue(self, work_queue: QueueSource) -> WorkQueue | None:
        """Return nothing: the handle names the queue."""
        return None

    def execute(self, context: Context) -> Any:
        """Wait until the jobs have ended.

        :raises AirflowFailException: there is no handle, or more jobs died, were cancelled or are unaccounted for
            than tolerated
        :raises DeadlineError: jobs are still running after ``wait_timeout``
        :raises JobsStalledError: no consumer delivers one of the jobs
        """
        with fail_on_terminal_errors():
            handle = runtime.JobsHandle.of(self.handle)
            self._limits(), self._parsed_defer_after()
            ends = JetStreamHook(self.nats_conn_id).blocking(self._wait, handle)
        summary = {"stream": handle.cursor.queue, "jobs": self._job_count}
        if isinstance(ends, runtime.JobsHandle):
            self.defer_waiting(ends, summary)
        return self.finish(summary, ends.as_json())

    async def _wait(self, connection: Connection, handle: JobsHandle) -> WaitReport | JobsHandle:
        now = handle.model_copy(update={"cursor": await handle.cursor_now(connection)})
        return await self.wait_inline(connection, now)
