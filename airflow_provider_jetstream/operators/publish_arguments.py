"""The arguments of the operator that publishes: checked when the DAG is parsed, and again once they are rendered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk import XComArg

from airflow_provider_jetstream.jetstream.errors import ArgumentError, JobError
from airflow_provider_jetstream.jetstream.publishing.job import Job
from airflow_provider_jetstream.jetstream.publishing.rate_limiter import check_rate
from airflow_provider_jetstream.jetstream.waiting.job_ids import JobIds
from airflow_provider_jetstream.operators.job_waiting import JobWaitingOperator
from airflow_provider_jetstream.tasks.arguments import check_function, check_text
from airflow_provider_jetstream.tasks.job_source import JobSource, require_jobs
from airflow_provider_jetstream.tasks.job_templates import references_of, rendered_job
from airflow_provider_jetstream.tasks.known_jobs import check_known_jobs, check_min_completed, check_subject
from airflow_provider_jetstream.tasks.mapped_arguments import check_shared_arguments
from airflow_provider_jetstream.tasks.outcome import fail_on_terminal_errors
from airflow_provider_jetstream.tasks.queue_source import require_events
from airflow_provider_jetstream.tasks.run_values import strict_environment
from airflow_provider_jetstream.tasks.template_values import is_absent, is_templated, parse_number, parse_time_limit
from airflow_provider_jetstream.tasks.wait_limits import WAIT_ARGUMENTS, parse_wait_timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import timedelta

    import jinja2
    from airflow.sdk import Context
    from airflow.sdk.definitions.mappedoperator import OperatorPartial

    from airflow_provider_jetstream.jetstream.publishing.job_keys import JobIdSource


class PublishArguments(JobWaitingOperator):
    """An operator with jobs to publish; see the operator itself for its arguments."""

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

    def __init__(
        self,
        *,
        jobs: Iterable[object] | Callable[..., Iterable[object]],
        subject: str | None = None,
        rate: float | str | None = None,
        room_timeout: timedelta | float | str | None = None,
        idempotency_key: str | None = None,
        job_id: JobIdSource | None = None,
        **kwargs: Any,
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
        self.subject = subject
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
        self._names = JobIds()
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

    @classmethod
    def partial(cls, **kwargs: Any) -> OperatorPartial:
        """Begin a mapped task, and check the arguments that its instances share."""
        check_shared_arguments(cls, kwargs, ("work_queue", "jobs"))
        return super().partial(**kwargs)

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
            return render(content, context, jinja_env, seen_oids)
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
        self._policy()
        self._stall_policy()
        self._parsed_defer_after()
        self._parsed_rate()
        parse_time_limit("room_timeout", self.room_timeout)
        parse_wait_timeout(self.wait_timeout)
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
        if isinstance(self.idempotency_key, bool) or not isinstance(self.idempotency_key, str | int):
            raise JobError(f"expected text as idempotency_key, found {self.idempotency_key!r}: convert it")
        return str(self.idempotency_key)
