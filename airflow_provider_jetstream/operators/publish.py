"""The operator that publishes jobs, and can wait for them."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.errors import ApiError, JobError, NotFoundError, TransientError
from airflow_provider_jetstream.jetstream.publishing.job import prepare_jobs
from airflow_provider_jetstream.jetstream.publishing.publish_log import PublishLog, StoredJobs
from airflow_provider_jetstream.jetstream.publishing.publisher import publish_prepared
from airflow_provider_jetstream.jetstream.publishing.report import PublishReport, sequence_ranges
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.units import NANOSECONDS, format_duration
from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor, take_cursor
from airflow_provider_jetstream.operators.job_waiting import JobWaitingOperator
from airflow_provider_jetstream.tasks.identity import origin_of, task_key
from airflow_provider_jetstream.tasks.job_source import JobSource, resolve_jobs
from airflow_provider_jetstream.tasks.outcome import fail_on_terminal_errors, json_result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from airflow.sdk import Context

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.waiting.report import WaitReport

SERVERS_DUPLICATE_WINDOW = 120 * NANOSECONDS


class JetStreamPublishOperator(JobWaitingOperator):
    """Publish jobs to a work queue; succeed when all are stored, or when all have ended.

    Ids are made from DAG, run, task, map index and job, and a publish log in the queue's events stream records what was
    stored: a retry stores nothing twice and resumes waiting, however late it comes. A task whose jobs have ended
    publishes new ones when it is cleared. Without events, a retry after the stream's ``duplicate_window`` stores jobs
    again.

    :param work_queue: a :class:`~airflow_provider_jetstream.jetstream.WorkQueue`, its dict, or its YAML's path
    :param jobs: a list or iterator of jobs, or a callable that returns one and takes values of the task's context by
        name; a job is a :class:`~airflow_provider_jetstream.jetstream.Job`, or just its body
    :param subject: the subject of jobs that name none; with the token ``{partition}`` where consumers divide the
        jobs
    :param wait_for_completion: wait until every job ended; not possible with scheduled jobs
    :param max_dead: dead letters to tolerate while waiting; ``None`` for any number
    :param max_cancelled: cancelled jobs to tolerate; ``None`` for any number
    :param max_vanished: jobs to tolerate that are gone without evidence of how they ended; ``None`` for any number
    :param min_completed: how many jobs have to complete, 1 for any of them, however the others end; not together with
        the three above
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
        self.jobs = JobSource.wrap(jobs)
        self.subject = subject

    def execute(self, context: Context) -> dict[str, Any]:
        """Publish the jobs, and wait for them if ``wait_for_completion`` is set.

        :raises AirflowFailException: a job can never be stored, or more died or were cancelled than tolerated
        :raises PublishIncompleteError: some jobs weren't stored this time
        """
        with fail_on_terminal_errors():
            queue = WorkQueue.load(self.work_queue)
            cursor, report, ends = JetStreamHook(self.nats_conn_id).blocking(
                self._publish, queue, resolve_jobs(self.jobs, context), origin_of(context), task_key(context)
            )
        summary = {
            "stream": report.stream or queue.name,
            "published": report.stored,
            "duplicates": report.duplicates,
            "scheduled": len(report.scheduled),
            "sequences": sequence_ranges(report.sequences),
        }
        self.log.info("%d jobs are stored in %s (%d were already)", report.stored, queue.name, report.duplicates)
        if cursor is None:
            return json_result(summary)
        if ends is None:
            self.defer_waiting(cursor, set(report.sequences), summary)
        return self.finish(summary, ends.as_json())

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None, **_: Any) -> dict[str, Any]:
        """Resume after the trigger.

        :raises AirflowFailException: more jobs died, were cancelled or vanished than tolerated, or waiting was
            impossible
        :raises DeadlineError: jobs are still running after ``wait_timeout``
        """
        if event and event["status"] == "ended":
            JetStreamHook(self.nats_conn_id).blocking(
                self._close_log, WorkQueue.load(self.work_queue), task_key(context)
            )
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
        # Read once, for the cursor and for the publish log.
        info = await self._stream_info(connection, queue)
        cursor = await take_cursor(connection, queue, info) if self.wait_for_completion else None
        log, stored = PublishLog(connection, queue, key), StoredJobs()
        started = await log.begin(info, asdict(cursor) if cursor else None) if info else None
        if started is None:
            self._warn_of_late_retries(queue)
        else:
            record, stored = started
            origin = replace(origin, round=record.round)
            if cursor is not None and record.cursor:
                # An earlier try may have published the jobs, and they may have ended before this try took its cursor.
                cursor = Cursor(**record.cursor)
        prepared = prepare_jobs(jobs, subject=self.subject, origin=origin, batch="", queue=queue)
        if cursor is not None:
            prepared = _without_schedules(prepared)
        report = await publish_prepared(connection, prepared, stored_sequence=stored.sequence_of)
        if cursor is not None or report.failures:
            await log.record_stored(report)
        report.raise_for_failures()
        if cursor is None:
            if started is not None:
                await self._close(log, report)
            return None, report, None
        if report.duplicates and started is None:
            cursor = cursor.from_start()
        ends = await self.wait_inline(connection, cursor, set(report.sequences))
        if ends:
            await self._close(log)
        return cursor, report, ends

    async def _stream_info(self, connection: Connection, queue: WorkQueue) -> dict[str, Any] | None:
        try:
            return await stream_info(connection, queue.name) if queue.events else None
        except NotFoundError:
            # Without waiting, the error of publishing says more: it names the job and its subject.
            if self.wait_for_completion:
                raise
            return None

    async def _close_log(self, connection: Connection, queue: WorkQueue, key: str) -> None:
        await self._close(PublishLog(connection, queue, key))

    async def _close(self, log: PublishLog, report: PublishReport | None = None) -> None:
        try:
            await log.close(report)
        except (ApiError, TransientError) as error:
            # Not raised: the record may be closed all the same, and a retry would then publish every job again.
            self.log.warning("The task's record wasn't closed, so a cleared task would publish nothing: %s", error)


def _without_schedules(jobs: Iterable[OutgoingJob]) -> Iterator[OutgoingJob]:
    for index, job in enumerate(jobs):
        if job.scheduled:
            raise JobError(
                f"job {index} is scheduled, and the server gives it a sequence only when it is due, so that it can't be"
                " waited for: publish it with a task that doesn't wait, or without a schedule"
            )
        yield job
