"""The operator that publishes jobs, and can wait for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Unpack, overload

from airflow.sdk import XComArg

from airflow_provider_jetstream.assets.stream_asset import StreamUse
from airflow_provider_jetstream.jetstream.errors import ArgumentError, JobError, TransientError
from airflow_provider_jetstream.jetstream.publishing.job import Job
from airflow_provider_jetstream.jetstream.publishing.rate_limiter import check_rate
from airflow_provider_jetstream.jetstream.units import NANOSECONDS, format_duration
from airflow_provider_jetstream.operators.job_waiting import JobMakingOperator
from airflow_provider_jetstream.tasks import runtime
from airflow_provider_jetstream.tasks.arguments import (
    WAIT_ARGUMENTS,
    check_function,
    check_shared_arguments,
    check_text,
    is_absent,
    is_templated,
    parse_number,
    parse_time_limit,
)
from airflow_provider_jetstream.tasks.context import fail_on_terminal_errors, json_result, origin_of, strict_environment
from airflow_provider_jetstream.tasks.hook import hook_for
from airflow_provider_jetstream.tasks.job_reports import bounded_result
from airflow_provider_jetstream.tasks.jobs import (
    JobSource,
    RenderedJobs,
    check_known_jobs,
    check_min_completed,
    check_subject,
    references_of,
    rendered_job,
    require_jobs,
    resolve_jobs,
)
from airflow_provider_jetstream.tasks.queue_source import load_queue, require_events

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import jinja2
    from airflow.sdk import Context
    from airflow.sdk.definitions.mappedoperator import OperatorPartial

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.publication import Publication
    from airflow_provider_jetstream.jetstream.publishing.job import JobIdSource
    from airflow_provider_jetstream.jetstream.publishing.report import PublishReport
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.waiting.handle import JobsHandle
    from airflow_provider_jetstream.jetstream.waiting.report import WaitReport
    from airflow_provider_jetstream.tasks.argument_types import (
        Count,
        Duration,
        JobMakingArguments,
        Jobs,
        Number,
        PublishOptions,
        Queue,
        Text,
        TolerantPublishOptions,
    )
    from airflow_provider_jetstream.tasks.job_reports import TaskResult

SERVERS_DUPLICATE_WINDOW = 120 * NANOSECONDS


class JetStreamPublishOperator(JobMakingOperator):
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
    :param max_unaccounted: jobs to tolerate that are gone without evidence of how they ended; ``None`` for any number
    :param min_completed: how many jobs have to complete, 1 for any of them, however the others end; not together with
        the three above
    :param cancel_on_kill: cancel the jobs that haven't ended when a person ends the task
    :param wait_timeout: how long to wait: a duration or seconds
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
        *WAIT_ARGUMENTS,
    )

    template_fields_renderers: ClassVar[dict[str, str]] = {"work_queue": "json", "jobs": "json"}
    ui_color = "#d9ecf5"
    event_fields = (
        "published",
        "duplicates",
        "held",
        "scheduled",
        "sequences",
        "completed",
        "dead",
        "cancelled",
        "unaccounted",
    )

    @overload
    def __init__(
        self, *, task_id: str, work_queue: Queue, jobs: Jobs, **options: Unpack[TolerantPublishOptions]
    ) -> None: ...

    @overload
    def __init__(
        self, *, task_id: str, work_queue: Queue, jobs: Jobs, min_completed: Count, **options: Unpack[PublishOptions]
    ) -> None: ...

    def __init__(
        self,
        *,
        jobs: Jobs,
        subject: Text | None = None,
        rate: Number | None = None,
        room_timeout: Duration | None = None,
        idempotency_key: Text | None = None,
        job_id: JobIdSource | None = None,
        **kwargs: Unpack[JobMakingArguments],
    ) -> None:
        super().__init__(**kwargs)
        check_subject(subject, self._known_queue)
        self.job_id = job_id
        if callable(job_id):
            check_function("job_id", job_id, "job", JobError)
        elif job_id is not None:
            check_text(job_id=job_id)
            if is_templated(job_id):
                raise ArgumentError(f"expected a field's name as job_id, which takes no template, found {job_id!r}")
        self.jobs = JobSource.wrap(jobs)
        if not is_templated(jobs):
            require_jobs(self.jobs)
        self.subject: Any = subject
        self.rate = rate
        self.room_timeout = room_timeout
        self.idempotency_key = idempotency_key
        self._has_idempotency_key = idempotency_key is not None
        # In these, a part that is nothing would be the same text for many runs.
        self._whole_templates = {
            name: value
            for name, value in (("idempotency_key", idempotency_key), ("subject", subject))
            if isinstance(value, str) and is_templated(value)
        }
        self._killed = False
        if not is_templated(rate):
            self._parsed_rate()
        if not is_templated(room_timeout):
            parse_time_limit("room_timeout", room_timeout)
        if not is_templated(idempotency_key):
            self._parsed_idempotency_key()
        if self.wait_for_completion:
            require_events(self._known_queue)
        check_known_jobs(jobs, subject, self._known_queue, job_id, waits=self.wait_for_completion)
        check_min_completed(jobs, self.min_completed)
        # Airflow looks for the results of other tasks in lists, and not in the jobs of a list.
        if not getattr(self, "_BaseOperator__from_mapped", False):
            XComArg.apply_upstream_relationship(self, references_of(jobs))

    if TYPE_CHECKING:

        @classmethod
        def partial(
            cls,
            *,
            task_id: str,
            work_queue: Queue = ...,
            jobs: Jobs = ...,
            min_completed: Count | None = ...,
            **options: Unpack[TolerantPublishOptions],
        ) -> OperatorPartial:
            """Begin a mapped task."""
            ...

    else:

        @classmethod
        def partial(cls, **kwargs: Any) -> OperatorPartial:
            """Begin a mapped task, and check the arguments that its instances share."""
            check_shared_arguments(cls, kwargs, ("work_queue", "jobs"))
            return super().partial(**kwargs)

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
            report, ends = hook_for(self.nats_conn_id).blocking(self._publish, queue, jobs, self._origin(context))
        summary = report.as_json()
        if ends is None:
            self.note_work(summary)
            return json_result(bounded_result(summary))
        if isinstance(ends, runtime.JobsHandle):
            self.defer_waiting(ends, summary)
        return self.finish(summary, ends.as_json())

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None, **_: Any) -> TaskResult:
        """Resume after the trigger.

        :raises AirflowFailException: more jobs died, were cancelled or are unaccounted for than tolerated, or waiting
            was impossible
        :raises DeadlineError: jobs are still running after ``wait_timeout``
        """
        if event and event["status"] == "ended":
            with fail_on_terminal_errors():
                hook_for(self.nats_conn_id).blocking(
                    self._close,
                    load_queue(self.work_queue, self),
                    self._origin(context),
                    over=bool(event["report"]["awaited"]),
                )
        return super().execute_complete(context, event)

    def on_kill(self) -> None:
        """Stop publishing, and cancel the jobs that haven't ended if ``cancel_on_kill`` is set."""
        self._killed = True
        super().on_kill()

    async def _publish(
        self, connection: Connection, queue: WorkQueue, jobs: Iterable[object], origin: Origin
    ) -> tuple[PublishReport, WaitReport | JobsHandle | None]:
        waits = self.wait_for_completion
        async with runtime.Publication(connection, queue, origin, waits=waits, with_handle=not waits) as publication:
            if not publication.is_recorded:
                self._warn_of_late_retries(queue)
            try:
                report = await publication.publish(
                    jobs,
                    subject=self.subject,
                    job_id=self.job_id,
                    rate=self._parsed_rate(),
                    room_timeout=parse_time_limit("room_timeout", self.room_timeout),
                    stopped=lambda: self._killed,
                )
            finally:
                if self._killed and publication.report:
                    await self._end_publishing(connection, publication, publication.report)
            ranges = report.awaited_ranges()
            self._log_published(report, queue, ranges)
            if (cursor := publication.cursor) is None:
                return report, None
            handle = runtime.JobsHandle(cursor=cursor, sequences=ranges, advised=report.advised)
            ends = await self.wait_inline(connection, handle, publication.job_ids)
            if isinstance(ends, runtime.WaitReport):
                await publication.close(over=bool(ends.awaited))
        return report, ends

    def _log_published(self, report: PublishReport, queue: WorkQueue, ranges: Sequence[tuple[int, int]]) -> None:
        """Log what is stored before a wait begins: a task that is killed leaves nothing but its log."""
        where = f", from sequence {ranges[0][0]} to {ranges[-1][-1]}" if ranges else ""
        self.log.info(
            "%d jobs are stored in %s%s (%d were already)", report.stored, queue.name, where, report.duplicates
        )
        if report.held:
            self.log.info("%d jobs aren't stored, since other jobs have their unique keys", len(report.held))

    async def _end_publishing(
        self, connection: Connection, publication: Publication, report: PublishReport
    ) -> NoReturn:
        if publication.cursor:
            await self._cancel_jobs(connection, publication.cursor, runtime.WaitReport(report.awaited()))
        raise TransientError(
            f"the task was ended while it published: {report.stored} jobs are stored; another try publishes the rest"
        )

    async def _close(self, connection: Connection, queue: WorkQueue, origin: Origin, *, over: bool) -> None:
        await runtime.Publication(connection, queue, origin).close(over=over)

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

    def render_template(
        self,
        content: Any,
        context: Context,
        jinja_env: jinja2.Environment | None = None,
        seen_oids: set[int] | None = None,
    ) -> Any:
        """Render a template field; in a list of jobs, the fields of each.

        :raises AirflowFailException: a field of a job rendered to nothing
        """
        render = super().render_template
        if not isinstance(content, Job):
            rendered = render(content, context, jinja_env, seen_oids)
            return RenderedJobs.wrap(rendered) if content is self.jobs else rendered
        environment = jinja_env or self.get_template_env()

        def render_field(value: Any, field: str) -> Any:
            strict = strict_environment(environment, f"{field} of a job", context) if field else environment
            return render(value, context, strict, seen_oids)

        with fail_on_terminal_errors():
            return rendered_job(content, render_field)

    def _check_rendered(self, jobs: object, context: Context) -> None:
        """Parse all that may be a template before the first job is sent."""
        for name, template in self._whole_templates.items():
            strict_environment(self.get_template_env(), name, context).from_string(template).render(**context)
        # A DAG with native templates may make anything of one.
        if self.subject is not None and not isinstance(self.subject, str):
            raise ArgumentError(
                f"expected text as subject, found that its template rendered to {self.subject!r}: correct it"
            )
        self._limits()
        self._parsed_defer_after()
        self._parsed_rate()
        parse_time_limit("room_timeout", self.room_timeout)
        check_min_completed(jobs, self.min_completed)

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
        if not self._has_idempotency_key:
            return None
        key: object = self.idempotency_key
        return runtime.checked_key(str(key) if type(key) is int else key)
