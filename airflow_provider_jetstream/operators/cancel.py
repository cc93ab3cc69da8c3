"""The operator that cancels jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Unpack, overload

from airflow.sdk import BaseOperator

from airflow_provider_jetstream.jetstream.errors import JobError
from airflow_provider_jetstream.jetstream.publishing.job import Job
from airflow_provider_jetstream.links.monitor import QueueLink
from airflow_provider_jetstream.tasks import runtime
from airflow_provider_jetstream.tasks.arguments import (
    DEFAULT_CONN_ID,
    check_optional_text,
    check_text,
    is_templated,
    parse_job_ids,
    parse_sequences,
    parse_text,
)
from airflow_provider_jetstream.tasks.context import NamedMissingValues, fail_on_terminal_errors, origin_of
from airflow_provider_jetstream.tasks.hook import hook_for
from airflow_provider_jetstream.tasks.jobs import JobSource, RenderedJobs, require_jobs, resolve_jobs
from airflow_provider_jetstream.tasks.queue_source import declared_queue, load_queue

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import jinja2
    from airflow.sdk import Context
    from airflow.sdk.definitions.mappedoperator import OperatorPartial

    from airflow_provider_jetstream.tasks.argument_types import (
        CancelOptions,
        JobIds,
        Jobs,
        Queue,
        Sequences,
        TaskArguments,
        Text,
    )


class JetStreamCancelOperator(NamedMissingValues, BaseOperator):
    """Cancel the jobs of some ids that are stored now, and schedules of such jobs; or the jobs of some sequences alone.

    The jobs are named in one of three ways. Jobs that are published later under the same id aren't cancelled. Workers
    obey of their own accord: before they start a job, or while it runs. The task doesn't wait for that, and succeeds
    also where no such job is stored.

    :param work_queue: a :class:`~airflow_provider_jetstream.jetstream.WorkQueue`, its dict, or its YAML's path;
        with events, which store the cancellations
    :param job_ids: an id or a list of ids; jobs of other publishers with these ids are cancelled too
    :param jobs: the jobs as they were published, each with an id: a list or iterator, or a callable that returns one
    :param sequences: their stream sequences, as numbers or as pairs of first and last, the form of a publishing task's
        result; for jobs whose publisher gave them no id
    :param why: a reason for people
    :param nats_conn_id: the Airflow connection
    :return: how many ids were cancelled, and how many schedules were removed; for ``sequences``, how many of the jobs
        were still stored
    :raises JobError: the jobs are named in no way or in several, or an id isn't one
    :raises SelectionError: the sequences aren't understood
    """

    operator_extra_links = (QueueLink(),)
    template_fields: Sequence[str] = ("work_queue", "job_ids", "jobs", "sequences", "why", "nats_conn_id")
    template_fields_renderers: ClassVar[dict[str, str]] = {
        "work_queue": "json",
        "job_ids": "json",
        "jobs": "json",
        "sequences": "json",
    }
    ui_color = "#f5d9d9"

    if TYPE_CHECKING:

        @classmethod
        def partial(
            cls,
            *,
            task_id: str,
            work_queue: Queue = ...,
            job_ids: JobIds = ...,
            jobs: Jobs = ...,
            sequences: Sequences = ...,
            **options: Unpack[CancelOptions],
        ) -> OperatorPartial:
            """Begin a mapped task."""
            ...

    @overload
    def __init__(
        self, *, task_id: str, work_queue: Queue, job_ids: JobIds, **options: Unpack[CancelOptions]
    ) -> None: ...

    @overload
    def __init__(self, *, task_id: str, work_queue: Queue, jobs: Jobs, **options: Unpack[CancelOptions]) -> None: ...

    @overload
    def __init__(
        self, *, task_id: str, work_queue: Queue, sequences: Sequences, **options: Unpack[CancelOptions]
    ) -> None: ...

    def __init__(
        self,
        *,
        work_queue: Queue,
        job_ids: JobIds | None = None,
        jobs: Jobs | None = None,
        sequences: Sequences | None = None,
        why: Text | None = None,
        nats_conn_id: str = DEFAULT_CONN_ID,
        **kwargs: Unpack[TaskArguments],
    ) -> None:
        super().__init__(**kwargs)
        check_text(nats_conn_id=nats_conn_id)
        check_optional_text(why=why)
        if queue := declared_queue(work_queue, self):
            runtime.events_stream(queue)
        named = {"job_ids": job_ids, "jobs": jobs, "sequences": sequences}
        given = [name for name, value in named.items() if value is not None]
        if len(given) != 1:
            found = f"found {' and '.join(given) or 'none of them'}"
            raise JobError(f"expected the jobs to cancel in one of job_ids, jobs and sequences, {found}")
        (self._named_by,) = given
        self.work_queue: Any = work_queue
        self.job_ids: Any = job_ids if job_ids is None or is_templated(job_ids) else parse_job_ids(job_ids)
        self.jobs = JobSource.wrap(jobs)
        self.sequences = sequences
        self.why = why
        self.nats_conn_id = nats_conn_id
        if sequences is not None and not is_templated(sequences):
            parse_sequences(sequences)
        if jobs is not None and not is_templated(jobs):
            require_jobs(self.jobs)
            if isinstance(jobs, list | tuple):
                list(_ids_of(jobs))

    def render_template(
        self,
        content: Any,
        context: Context,
        jinja_env: jinja2.Environment | None = None,
        seen_oids: set[int] | None = None,
    ) -> Any:
        """Render a template field."""
        rendered = super().render_template(content, context, jinja_env, seen_oids)
        return RenderedJobs.wrap(rendered) if content is self.jobs else rendered

    def execute(self, context: Context) -> dict[str, int]:
        """Cancel the jobs.

        :raises AirflowFailException: the jobs can't be cancelled as they are named, or the queue stores no
            cancellations
        """
        origin, hook, why = origin_of(context), hook_for(self.nats_conn_id), parse_text(self.why)
        by = f"{origin.dag_id}/{origin.run_id}/{origin.task_id}"
        with fail_on_terminal_errors():
            queue = load_queue(self.work_queue, self)
            if self._named_by == "sequences":
                events, sequences = runtime.events_stream(queue), parse_sequences(self.sequences)
                count = hook.blocking(runtime.cancel_stored, queue.name, events, sequences, why, by)
                self.log.info("%d of %d jobs of %s are still stored, and cancelled", count, len(sequences), queue.name)
                return {"cancelled": count, "schedules": 0}
            if self._named_by == "job_ids":
                ids = parse_job_ids(self.job_ids)
            else:
                ids = list(_ids_of(resolve_jobs(self.jobs, context)))
            reports = hook.blocking(runtime.cancel_jobs, queue, ids, why, by)
        schedules = sum(report.schedules for report in reports)
        self.log.info("%d ids are cancelled in %s, and %d schedules removed", len(reports), queue.name, schedules)
        return {"cancelled": len(reports), "schedules": schedules}


def _ids_of(jobs: Iterable[object]) -> Iterator[str]:
    for index, item in enumerate(jobs):
        job_id = Job.of(item).id
        if job_id is None:
            raise JobError(
                f"job {index} has no id to cancel it by: give it one where it is published, or name the jobs by the"
                " sequences of the publishing task's result"
            )
        yield str(job_id)
