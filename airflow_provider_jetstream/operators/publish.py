"""The operator that publishes jobs, and can wait for them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from airflow_provider_jetstream.assets.task_assets import StreamUse
from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.errors import ApiError, JobError, NotFoundError, TransientError
from airflow_provider_jetstream.jetstream.publishing.advisory_pages import AdvisoryPages
from airflow_provider_jetstream.jetstream.publishing.manifest import Manifest
from airflow_provider_jetstream.jetstream.publishing.manifest_rows import read_manifest_sequences
from airflow_provider_jetstream.jetstream.publishing.outbox import Outbox
from airflow_provider_jetstream.jetstream.publishing.publication import Publication
from airflow_provider_jetstream.jetstream.publishing.report import PublishReport, sequence_ranges
from airflow_provider_jetstream.jetstream.units import NANOSECONDS, format_duration
from airflow_provider_jetstream.jetstream.waiting.cursor import take_cursor
from airflow_provider_jetstream.jetstream.waiting.handle import add_handle, handle_cursor
from airflow_provider_jetstream.jetstream.waiting.job_ids import JobIds, NotedIds
from airflow_provider_jetstream.jetstream.waiting.policy import WaitPolicy
from airflow_provider_jetstream.jetstream.waiting.report import WaitReport
from airflow_provider_jetstream.jetstream.waiting.wait import wait
from airflow_provider_jetstream.operators.publish_arguments import PublishArguments
from airflow_provider_jetstream.tasks.identity import origin_of
from airflow_provider_jetstream.tasks.job_reports import bounded_result
from airflow_provider_jetstream.tasks.job_source import resolve_jobs
from airflow_provider_jetstream.tasks.outcome import fail_on_terminal_errors, json_result
from airflow_provider_jetstream.tasks.queue_source import load_queue
from airflow_provider_jetstream.tasks.template_values import parse_time_limit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from airflow.sdk import Context

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.publishing.manifest_head import ManifestHead
    from airflow_provider_jetstream.jetstream.publishing.outbox import KnownJobs
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
    from airflow_provider_jetstream.tasks.job_reports import TaskResult

SERVERS_DUPLICATE_WINDOW = 120 * NANOSECONDS
_NAMED_RANGES = 5
# How long a cleared task looks whether jobs that an earlier try no longer waited for have ended by now.
_ENDED_SECONDS = 10.0


class JetStreamPublishOperator(PublishArguments):
    """Publish jobs to a work queue; succeed when all are stored, or when all have ended.

    Ids are made from DAG, run, task, map index and job, and a manifest in the queue's events stream records what was
    stored: a retry stores nothing twice and resumes waiting, however late it comes. A task whose jobs have ended
    publishes new ones when it is cleared. Without events, a retry after the stream's ``duplicate_window`` stores jobs
    again.

    :param work_queue: a :class:`~airflow_provider_jetstream.jetstream.WorkQueue`, its dict, or its YAML's path
    :param jobs: a list or iterator of jobs, or a callable that returns one and takes values of the task's context by
        name; a job is a :class:`~airflow_provider_jetstream.jetstream.Job`, or just its body.
        A field of a job may be a template
    :param subject: the subject of jobs that name none; with the token ``{partition}`` where consumers divide the
        jobs
    :param rate: jobs a second at most; as fast as possible where absent
    :param room_timeout: how long a full queue (``discard: new``) may store no job before the task fails: a duration or
        seconds. Where absent, the task fails as soon as the queue is full. A retry publishes the rest
    :param idempotency_key: publish each job once for this key, whatever the run, such as
        ``{{ dag_run.run_after | ds }}`` for a day; needs events. A task that is cleared publishes nothing again, and
        waits for the same jobs
    :param job_id: what identifies a job that has no id of its own: a field of its body that is a JSON object, or a
        function that takes the job and returns its id
    :param wait_for_completion: wait until every job ended; not possible with scheduled jobs
    :param max_dead: dead letters to tolerate while waiting; ``None`` for any number
    :param max_cancelled: cancelled jobs to tolerate; ``None`` for any number
    :param max_vanished: jobs to tolerate that are gone without evidence of how they ended; ``None`` for any number
    :param min_completed: how many jobs have to complete, 1 for any of them, however the others end; not together with
        the three above
    :param cancel_on_kill: cancel the jobs that haven't ended when a person ends the task
    :param wait_timeout: how long to wait: a duration or seconds
    :param deferrable: wait in the triggerer rather than in a worker slot
    :param nats_conn_id: the Airflow connection
    :return: stream, counts, and sequences as ranges
    """

    template_fields_renderers: ClassVar[dict[str, str]] = {"work_queue": "json", "jobs": "json"}
    ui_color = "#d9ecf5"
    event_fields = ("published", "duplicates", "scheduled", "sequences", "completed", "dead", "cancelled", "vanished")

    def stream_use(self, queue: WorkQueue, work: Mapping[str, Any]) -> StreamUse:
        """Return the stream that has the jobs."""
        return StreamUse(written=[(queue.name, work.get("published"))])

    def execute(self, context: Context) -> TaskResult:
        """Publish the jobs, and wait for them if ``wait_for_completion`` is set.

        :raises AirflowFailException: a job can never be stored, or more died or were cancelled than tolerated
        :raises PublishIncompleteError: some jobs weren't stored this time
        """
        with fail_on_terminal_errors():
            queue, jobs = load_queue(self.work_queue, self), resolve_jobs(self.jobs, context)
            self._check_rendered(jobs, context)
            cursor, report, ends = JetStreamHook(self.nats_conn_id).blocking(
                self._publish, queue, jobs, self._origin(context)
            )
        summary = report.as_json()
        self.log.info("%d jobs are stored in %s (%d were already)", report.stored, queue.name, report.duplicates)
        if cursor is None:
            self.note_work(summary)
            return json_result(bounded_result(summary))
        if ends is None:
            advised_by = report.manifest_key if report.advised else None
            self.defer_waiting(cursor, report.awaited(), summary, advised_by)
        return self.finish(summary, ends.as_json())

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None, **_: Any) -> TaskResult:
        """Resume after the trigger.

        :raises AirflowFailException: more jobs died, were cancelled or vanished than tolerated, or waiting was
            impossible
        :raises DeadlineError: jobs are still running after ``wait_timeout``
        """
        if event and event["status"] == "ended":
            JetStreamHook(self.nats_conn_id).blocking(
                self._close_manifest,
                load_queue(self.work_queue, self),
                self._origin(context),
                over=bool(event["report"]["awaited"]),
            )
        return super().execute_complete(context, event)

    def on_kill(self) -> None:
        """Stop publishing, and cancel the jobs that haven't ended if ``cancel_on_kill`` is set."""
        self._killed = True
        super().on_kill()

    def _origin(self, context: Context) -> Origin:
        return origin_of(context, self._parsed_idempotency_key())

    def _warn_of_late_retries(self, queue: WorkQueue) -> None:
        window = queue.duplicate_window or SERVERS_DUPLICATE_WINDOW
        if self._has_idempotency_key:
            self.log.warning(
                "%s has no events stream that records what is published, so the idempotency_key holds only for its"
                " duplicate_window of %s: declare events",
                queue.name,
                format_duration(window),
            )
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
        self, connection: Connection, queue: WorkQueue, jobs: Iterable[object], origin: Origin
    ) -> tuple[Cursor | None, PublishReport, WaitReport | None]:
        # Read once, for the cursor and for the manifest.
        info = await self._stream_info(connection, queue)
        cursor = await take_cursor(connection, queue, info) if self.wait_for_completion else None
        begun = await Publication.begin(
            connection,
            queue,
            origin,
            info=info,
            cursor=asdict(cursor) if cursor else None,
            have_ended=partial(self._have_ended, connection, cursor) if cursor else None,
        )
        if begun.manifest is None:
            self._warn_of_late_retries(queue)
        resumed_from = begun.head.position("events_from") if begun.head else None
        if cursor is not None and begun.head and resumed_from:
            # An earlier try may have published the jobs, and they may have ended before this try took its cursor.
            cursor = cursor.resumed(resumed_from, begun.head.position("dead_letters_from") or 1)
        report = await self._send(connection, queue, jobs, begun, origin, cursor)
        is_incomplete = report.failures or report.source_error or self._killed
        if begun.manifest and (cursor is not None or is_incomplete):
            await begun.manifest.record_stored(report)
        if self._killed:
            await self._end_publishing(connection, cursor, report)
        report.raise_for_failures()
        if report.extra:
            self.log.warning(
                "An earlier try has stored %d jobs in %s that aren't among the jobs any more: sequences %s",
                *(len(report.extra), queue.name, sequence_ranges(report.extra)[:_NAMED_RANGES]),
            )
        if cursor is None:
            await add_handle(connection, handle_cursor(queue, report), report, origin.key)
            if begun.manifest:
                await self._close(begun.manifest, report)
            return None, report, None
        if report.duplicates and not resumed_from:
            cursor = cursor.from_start()
        ends = await self.wait_inline(connection, cursor, report.awaited(), report.advised, self._names)
        if ends and begun.manifest:
            await self._close(begun.manifest, over=bool(ends.awaited))
        return cursor, report, ends

    async def _send(
        self,
        connection: Connection,
        queue: WorkQueue,
        jobs: Iterable[object],
        begun: Publication,
        origin: Origin,
        cursor: Cursor | None,
    ) -> PublishReport:
        prepared = begun.prepare(jobs, self.subject, self.job_id)
        self._names = JobIds()
        known: KnownJobs = begun
        if cursor is not None:
            prepared.then(_refuse_schedule)
            known = NotedIds(begun, self._names)
        origin = begun.origin or origin
        pages = AdvisoryPages(connection, queue, origin.manifest_key, origin)
        reserved: Iterable[OutgoingJob] = prepared
        if cursor is not None and begun.manifest:
            reserved = await pages.reserve(begun.advised, prepared, cursor.created)
        outbox = Outbox(
            connection,
            rate=self._parsed_rate(),
            room_timeout=parse_time_limit("room_timeout", self.room_timeout),
            destination=begun.destination,
            stopped=lambda: self._killed,
        )
        async with begun:
            report = await outbox.send(reserved, known, begun.save_progress)
        await begun.complete(report, outbox)
        self._names.locate(report.queue_sequences())
        await pages.record(report.advised)
        return report

    async def _have_ended(self, connection: Connection, cursor: Cursor, head: ManifestHead) -> bool:
        """Return whether all jobs of an earlier try have ended, whose waiting was over before they had."""
        key = head.manifest_origin.manifest_key if head.manifest_origin else ""
        sequences = await read_manifest_sequences(connection, cursor.events, cursor.queue, key)
        if sequences is None:
            return False
        resumed = cursor.resumed(head.position("events_from") or 1, head.position("dead_letters_from") or 1)
        report = WaitReport(set(sequences))
        with suppress(TimeoutError):
            async with asyncio.timeout(_ENDED_SECONDS):
                await wait(connection, resumed, report, policy=WaitPolicy(None, None, None))
        return not report.awaited

    async def _end_publishing(self, connection: Connection, cursor: Cursor | None, report: PublishReport) -> NoReturn:
        if cursor is not None:
            await self._cancel_jobs(connection, cursor, WaitReport(report.awaited()))
        raise TransientError(
            f"the task was ended while it published: {report.stored} jobs are stored; another try publishes the rest"
        )

    async def _stream_info(self, connection: Connection, queue: WorkQueue) -> dict[str, Any] | None:
        try:
            return await stream_info(connection, queue.name) if queue.events else None
        except NotFoundError:
            # Without waiting, the error of publishing says more: it names the job and its subject.
            if self.wait_for_completion:
                raise
            return None

    async def _close_manifest(self, connection: Connection, queue: WorkQueue, origin: Origin, *, over: bool) -> None:
        await self._close(Manifest(connection, queue, origin, origin.manifest_key), over=over)

    async def _close(self, manifest: Manifest, report: PublishReport | None = None, *, over: bool = False) -> None:
        """Close the manifest, or record that waiting is over while jobs may still run."""
        try:
            await (manifest.mark_over() if over else manifest.close(report))
        except (ApiError, TransientError) as error:
            # Not raised: the record may be closed all the same, and a retry would then publish every job again.
            self.log.warning("The manifest wasn't closed, so a cleared task would publish nothing: %s", error)


def _refuse_schedule(index: int, job: OutgoingJob) -> None:
    if job.scheduled:
        raise JobError(
            f"job {index} is scheduled, and the server gives it a sequence only when it is due, so that it can't be"
            " waited for: publish it with a task that doesn't wait, or without a schedule"
        )
