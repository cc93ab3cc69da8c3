"""The operator that publishes jobs, and waits for them if asked to."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.errors import ApiError, JobError, TransientError
from airflow_provider_jetstream.jetstream.publishing.job import prepare
from airflow_provider_jetstream.jetstream.publishing.publish_log import PublishLog
from airflow_provider_jetstream.jetstream.publishing.publisher import publish
from airflow_provider_jetstream.jetstream.publishing.recovery import PublishedBefore
from airflow_provider_jetstream.jetstream.publishing.report import PublishReport, ranges
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.units import NANOSECONDS, format_duration
from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor, take_cursor
from airflow_provider_jetstream.operators.job_waiting import JobWaitingOperator
from airflow_provider_jetstream.tasks.error_mapping import terminal_errors_fail
from airflow_provider_jetstream.tasks.identity import origin_of, run_key
from airflow_provider_jetstream.tasks.job_source import JobSource, jobs_of
from airflow_provider_jetstream.tasks.xcom import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from airflow.providers.common.compat.sdk import Context

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.waiting.report import WaitReport

SERVERS_DUPLICATE_WINDOW = 120 * NANOSECONDS


class JetStreamPublishOperator(JobWaitingOperator):
    """Publish jobs to a work queue; succeed when all are stored, or when all have ended.

    Ids are made from DAG, run, task, map index and job, and the queue's events keep a receipt of what was stored: a
    retry stores nothing twice and takes up the waiting, however late it comes. A task whose jobs have ended publishes
    new ones when it is cleared. Without events, a retry after the stream's ``duplicate_window`` stores jobs again.

    :param work_queue: a :class:`~airflow_provider_jetstream.jetstream.WorkQueue`, its dict, or its YAML's path
    :param jobs: a list or iterator of jobs, or a callable that returns one and may take anything of the task's context;
        a job is a :class:`~airflow_provider_jetstream.jetstream.Job`, or just its body
    :param subject: the subject of jobs that name none; with ``{partition}`` in place of a token where consumers divide
        the jobs
    :param wait_for_completion: wait until every job ended; not possible with jobs for later
    :param max_dead: dead letters to put up with while waiting; ``None`` for any number
    :param max_cancelled: cancelled jobs to put up with; ``None`` for any number
    :param max_vanished: jobs that are gone without a word of how they ended, to put up with; ``None`` for any number
    :param min_completed: how many jobs have to complete, 1 for any of them, whatever becomes of the others; not
        together with the three above
    :param cancel_on_kill: cancel the jobs that haven't ended when a person ends the task
    :param wait_timeout: how long to wait
    :param deferrable: wait in the triggerer rather than in a worker slot
    :param nats_conn_id: the Airflow connection
    :return: stream, counts, and sequences as ranges
    """

    template_fields: Sequence[str] = ("work_queue", "jobs", "subject", "nats_conn_id")
    ui_color = "#d9ecf5"

    def __init__(
        self,
        *,
        jobs: Iterable[object] | Callable[..., Iterable[object]],
        subject: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.jobs = JobSource.keep(jobs)
        self.subject = subject

    def execute(self, context: Context) -> dict[str, Any]:
        """Publish, and wait if asked to.

        :param context: the task's context
        :return: the result of the task
        :raises AirflowFailException: a job can never be stored, or too many died or were cancelled
        :raises PublishIncompleteError: some jobs weren't stored this time
        """
        with terminal_errors_fail():
            queue = WorkQueue.load(self.work_queue)
            mark, report, ended = JetStreamHook(self.nats_conn_id).blocking(
                self._publish, queue, jobs_of(self.jobs, context), origin_of(context), run_key(context)
            )
        summary = {
            "stream": report.stream or queue.name,
            "published": report.stored,
            "duplicates": report.duplicates,
            "scheduled": len(report.scheduled),
            "sequences": ranges(report.sequences),
        }
        self.log.info("%d jobs are stored in %s (%d were already)", report.stored, queue.name, report.duplicates)
        if mark is None:
            return plain(summary)
        if ended is None:
            self.defer_waiting(mark, set(report.sequences), summary)
        return self.conclude(summary, ended.as_json())

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None, **_: Any) -> dict[str, Any]:
        """Go on after the trigger.

        :param context: the task's context
        :param event: what the trigger found
        :return: the result of the task
        :raises AirflowFailException: too many jobs ended otherwise than well, or waiting was impossible
        :raises DeadlineError: jobs are still running after ``wait_timeout``
        """
        if event and event["status"] == "ended":
            JetStreamHook(self.nats_conn_id).blocking(self._end, WorkQueue.load(self.work_queue), run_key(context))
        return super().execute_complete(context, event)

    def _warn_of_late_retries(self, queue: WorkQueue) -> None:
        window = queue.duplicate_window or SERVERS_DUPLICATE_WINDOW
        if self.retries and self.retry_delay.total_seconds() * NANOSECONDS >= window:
            self.log.warning(
                "A retry comes %s after a failure, and %s forgets the ids of jobs after %s: what this try stores and"
                " workers finish would be stored and run again; declare a longer duplicate_window or a shorter"
                " retry_delay",
                self.retry_delay,
                queue.name,
                format_duration(window),
            )

    async def _publish(
        self, connection: Connection, queue: WorkQueue, jobs: Iterable[object], origin: Origin, key: str
    ) -> tuple[Cursor | None, PublishReport, WaitReport | None]:
        mark = await take_cursor(connection, queue) if self.wait_for_completion else None
        receipts = await PublishLog.open(connection, queue, key)
        before = PublishedBefore()
        if receipts is None:
            self._warn_of_late_retries(queue)
        else:
            receipt, before = await receipts.begin(asdict(mark) if mark else {})
            origin = replace(origin, round=receipt.round)
            if mark is not None and receipt.mark:
                # An earlier try may have published them, and they may have ended before this one took its mark.
                mark = Cursor(**receipt.mark)
        prepared = prepare(jobs, subject=self.subject, origin=origin, batch="", queue=queue)
        if mark is not None:
            prepared = _for_now(prepared)
        report = await publish(connection, prepared, known=before.known)
        if receipts is not None:
            await receipts.keep(report)
        report.raise_for_failures()
        if mark is None:
            await self._end(connection, queue, key)
            return None, report, None
        if report.duplicates and receipts is None:
            mark = mark.from_start()
        ended = await self.wait_inline(connection, mark, set(report.sequences))
        if ended:
            await self._end(connection, queue, key)
        return mark, report, ended

    async def _end(self, connection: Connection, queue: WorkQueue, key: str) -> None:
        try:
            if receipts := await PublishLog.open(connection, queue, key):
                await receipts.close()
        except (ApiError, TransientError) as error:
            self.log.warning("The end couldn't be recorded, a cleared task would publish nothing: %s", error)


def _for_now(jobs: Iterable[OutgoingJob]) -> Iterator[OutgoingJob]:
    for index, job in enumerate(jobs):
        if job.scheduled:
            raise JobError(
                f"job {index} is for later, and the server gives it a sequence only then, so that it can't be waited"
                " for: publish it with a task that doesn't wait, or have it done now"
            )
        yield job
