"""The operator that publishes jobs, and can wait for them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.errors import ApiError, JobError, NotFoundError, TransientError
from airflow_provider_jetstream.jetstream.publishing.advised_jobs import AdvisedJobs
from airflow_provider_jetstream.jetstream.publishing.advisory_pages import AdvisoryPages
from airflow_provider_jetstream.jetstream.publishing.job import prepare_jobs
from airflow_provider_jetstream.jetstream.publishing.publish_log import PublishLog
from airflow_provider_jetstream.jetstream.publishing.publisher import check_rate, publish_prepared
from airflow_provider_jetstream.jetstream.publishing.report import PublishReport, sequence_ranges
from airflow_provider_jetstream.jetstream.publishing.stored_jobs import StoredJobs
from airflow_provider_jetstream.jetstream.queue.message_size import SizeLimit
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.units import NANOSECONDS, format_duration
from airflow_provider_jetstream.jetstream.waiting.cursor import take_cursor
from airflow_provider_jetstream.jetstream.waiting.report import WaitReport
from airflow_provider_jetstream.operators.job_waiting import JobWaitingOperator
from airflow_provider_jetstream.tasks.arguments import check_text
from airflow_provider_jetstream.tasks.identity import origin_of
from airflow_provider_jetstream.tasks.job_source import JobSource, require_jobs, resolve_jobs
from airflow_provider_jetstream.tasks.outcome import fail_on_terminal_errors, json_result
from airflow_provider_jetstream.tasks.template_values import is_absent, is_templated, parse_number, parse_time_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from datetime import timedelta

    from airflow.sdk import Context

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor

SERVERS_DUPLICATE_WINDOW = 120 * NANOSECONDS


@dataclass(frozen=True, slots=True)
class _BegunPublication:
    """What is known before the first job is sent.

    :param info: the queue's STREAM.INFO; ``None`` where it isn't needed
    :param cursor: where the ends of the jobs are found; ``None`` where the task doesn't wait
    :param has_record: whether the publish log has a record of the task
    """

    queue: WorkQueue
    origin: Origin
    info: dict[str, Any] | None
    cursor: Cursor | None
    stored: StoredJobs
    has_record: bool


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
    :param rate: jobs a second at most; as fast as possible where absent
    :param room_timeout: how long a full queue (``discard: new``) may store no job before the task fails: a duration or
        seconds. Where absent, the task fails as soon as the queue is full. A retry publishes the rest
    :param idempotency_key: publish each job once for this key, whatever the run, such as ``{{ ds }}``; needs events. A
        task that is cleared publishes nothing again, and waits for the same jobs
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

    template_fields: Sequence[str] = (
        "work_queue",
        "jobs",
        "subject",
        "rate",
        "room_timeout",
        "idempotency_key",
        "nats_conn_id",
    )
    ui_color = "#d9ecf5"

    def __init__(
        self,
        *,
        jobs: Iterable[object] | Callable[..., Iterable[object]],
        subject: str | None = None,
        rate: float | str | None = None,
        room_timeout: timedelta | float | str | None = None,
        idempotency_key: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if subject is not None:
            check_text(subject=subject)
        self.jobs = JobSource.wrap(jobs)
        if not is_templated(jobs):
            require_jobs(self.jobs)
        self.subject = subject
        self.rate = rate
        self.room_timeout = room_timeout
        self.idempotency_key = idempotency_key
        self._has_idempotency_key = idempotency_key is not None
        self._killed = False
        if not is_templated(rate):
            self._parsed_rate()
        if not is_templated(room_timeout):
            parse_time_limit("room_timeout", room_timeout)
        if not is_templated(idempotency_key):
            self._parsed_idempotency_key()

    def execute(self, context: Context) -> dict[str, Any]:
        """Publish the jobs, and wait for them if ``wait_for_completion`` is set.

        :raises AirflowFailException: a job can never be stored, or more died or were cancelled than tolerated
        :raises PublishIncompleteError: some jobs weren't stored this time
        """
        with fail_on_terminal_errors():
            queue = WorkQueue.load(self.work_queue)
            cursor, report, ends = JetStreamHook(self.nats_conn_id).blocking(
                self._publish, queue, resolve_jobs(self.jobs, context), self._origin(context)
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
            advised_by = self._origin(context).log_key if report.advised else None
            self.defer_waiting(cursor, set(report.sequences), summary, advised_by)
        return self.finish(summary, ends.as_json())

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None, **_: Any) -> dict[str, Any]:
        """Resume after the trigger.

        :raises AirflowFailException: more jobs died, were cancelled or vanished than tolerated, or waiting was
            impossible
        :raises DeadlineError: jobs are still running after ``wait_timeout``
        """
        if event and event["status"] == "ended":
            JetStreamHook(self.nats_conn_id).blocking(
                self._close_log, WorkQueue.load(self.work_queue), self._origin(context)
            )
        return super().execute_complete(context, event)

    def on_kill(self) -> None:
        """Stop publishing, and cancel the jobs that haven't ended if ``cancel_on_kill`` is set."""
        self._killed = True
        super().on_kill()

    def _origin(self, context: Context) -> Origin:
        return origin_of(context, self._parsed_idempotency_key())

    def _parsed_rate(self) -> float | None:
        rate = parse_number("rate", self.rate, float, JobError)
        check_rate(rate)
        return rate

    def _parsed_idempotency_key(self) -> str | None:
        if self._has_idempotency_key and is_absent(self.idempotency_key):
            raise JobError(
                "expected an idempotency_key, found that its template rendered to nothing, which would be the same key"
                " for every run: see why, or leave it out"
            )
        return str(self.idempotency_key) if self._has_idempotency_key else None

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
        # Read once, for the cursor and for the publish log.
        info = await self._stream_info(connection, queue)
        cursor = await take_cursor(connection, queue, info) if self.wait_for_completion else None
        log = PublishLog(connection, queue, origin, origin.log_key)
        started = await log.begin(info, asdict(cursor) if cursor else None) if info else None
        if started is None:
            self._warn_of_late_retries(queue)
        record, stored = started or (None, StoredJobs())
        origin = replace(origin, round=record.round if record else 0)
        resumed_from = record.position("events_from") if record else None
        if cursor is not None and record and resumed_from:
            # An earlier try may have published the jobs, and they may have ended before this try took its cursor.
            cursor = cursor.resumed(resumed_from, record.position("dead_letters_from") or 1)
        begun = _BegunPublication(queue, origin, info, cursor, stored, has_record=record is not None)
        report = await self._send(connection, jobs, begun)
        if cursor is not None or report.failures or self._killed:
            await log.record_stored(report)
        if self._killed:
            await self._end_publishing(connection, cursor, report)
        report.raise_for_failures()
        if cursor is None:
            if record:
                await self._close(log, report)
            return None, report, None
        if report.duplicates and not resumed_from:
            cursor = cursor.from_start()
        ends = await self.wait_inline(connection, cursor, set(report.sequences), report.advised)
        if ends:
            await self._close(log)
        return cursor, report, ends

    async def _send(self, connection: Connection, jobs: Iterable[object], begun: _BegunPublication) -> PublishReport:
        queue, origin, info = begun.queue, begun.origin, begun.info
        # What all runs of an idempotency key have published isn't what this run has.
        own_log = PublishLog(connection, queue, origin) if origin.log_key != origin.key else None
        by_key = bool(info and await own_log.announce(info)) if own_log else begun.has_record
        prepared = prepare_jobs(
            jobs,
            subject=self.subject,
            origin=origin,
            batch="",
            queue=queue,
            by_key=by_key,
            limit=SizeLimit.of(queue, info["config"] if info else None),
        )
        message_ids: list[str] = []
        if own_log:
            prepared = _with_ids_noted(prepared, message_ids)
        if begun.cursor is not None:
            prepared = _without_schedules(prepared)
        advised = AdvisedJobs.of(queue)
        prepared = advised.collect(prepared)
        pages = AdvisoryPages(connection, queue, origin.log_key, origin)
        if begun.cursor is not None and begun.has_record:
            prepared = await pages.reserve(advised, prepared, begun.cursor.created)
        report = await publish_prepared(
            connection,
            prepared,
            stored_sequence=begun.stored.sequence_of,
            rate=self._parsed_rate(),
            room_timeout=parse_time_limit("room_timeout", self.room_timeout),
            stopped=lambda: self._killed,
        )
        report.message_ids, report.advised = message_ids, advised.sequences(report)
        await pages.record(report.advised)
        if own_log and by_key:
            await own_log.conclude(report)
        return report

    async def _end_publishing(self, connection: Connection, cursor: Cursor | None, report: PublishReport) -> NoReturn:
        if cursor is not None:
            await self._cancel_jobs(connection, cursor, WaitReport(set(report.sequences) - {0}))
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

    async def _close_log(self, connection: Connection, queue: WorkQueue, origin: Origin) -> None:
        await self._close(PublishLog(connection, queue, origin, origin.log_key))

    async def _close(self, log: PublishLog, report: PublishReport | None = None) -> None:
        try:
            await log.close(report)
        except (ApiError, TransientError) as error:
            # Not raised: the record may be closed all the same, and a retry would then publish every job again.
            self.log.warning("The task's record wasn't closed, so a cleared task would publish nothing: %s", error)


def _with_ids_noted(jobs: Iterable[OutgoingJob], message_ids: list[str]) -> Iterator[OutgoingJob]:
    for job in jobs:
        message_ids.append(job.message_id)
        yield job


def _without_schedules(jobs: Iterable[OutgoingJob]) -> Iterator[OutgoingJob]:
    for index, job in enumerate(jobs):
        if job.scheduled:
            raise JobError(
                f"job {index} is scheduled, and the server gives it a sequence only when it is due, so that it can't be"
                " waited for: publish it with a task that doesn't wait, or without a schedule"
            )
        yield job
