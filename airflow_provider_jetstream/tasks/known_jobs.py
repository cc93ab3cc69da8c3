"""What can be said of jobs before any is sent: of a list when the DAG is parsed, and once more when it is rendered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any, subject_problem
from airflow_provider_jetstream.jetstream.errors import ArgumentError, JobError
from airflow_provider_jetstream.jetstream.publishing.job import Job
from airflow_provider_jetstream.jetstream.publishing.preparation import PreparedJobs, refuse_schedule
from airflow_provider_jetstream.jetstream.queue.declaration import partition_subject, placeholder_problem
from airflow_provider_jetstream.jetstream.queue.message_size import SizeLimit
from airflow_provider_jetstream.tasks.template_values import is_templated, parse_count

if TYPE_CHECKING:
    from collections.abc import Iterable

    from airflow_provider_jetstream.jetstream.publishing.job import JobIdSource
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


def check_subject(subject: object, queue: WorkQueue | None = None) -> None:
    """Refuse what is no subject of a job, when the DAG is parsed.

    :param queue: ``None`` where it isn't known yet
    :raises ArgumentError: it is none, or one that the queue doesn't capture
    """
    if subject is None or is_templated(subject):
        return
    if not isinstance(subject, str) or not subject.strip():
        raise ArgumentError(f"expected text as subject, found {subject!r}: correct it")
    problem = placeholder_problem(subject) if "{" in subject or "}" in subject else None
    if problem := problem or subject_problem(partition_subject(subject, 0), wildcards=False):
        raise ArgumentError(f"expected the subject of a job as subject, found {subject!r}: {problem}; correct it")
    if queue is None:
        return
    captured = queue.subjects
    if not covered_by_any(captured, partition_subject(subject, 0)):
        raise ArgumentError(
            f"expected a subject of {queue.name} ({', '.join(captured)}) as subject, found {subject!r}: choose one of"
            " them, or add this one to the declaration"
        )
    if "{" in subject and queue.partition_count(subject) is None:
        raise ArgumentError(
            f"expected a subject on which a consumer of {queue.name} has partitions, found {subject!r}: declare one"
            " with partitions and such a filter, or name another subject"
        )


def check_known_jobs(
    jobs: object, subject: Any, queue: WorkQueue | None, job_id: JobIdSource | None = None, *, waits: bool
) -> None:
    """Refuse jobs of a list that can't be published; leave to the task what holds templates, or needs the queue's file.

    :param subject: the subject of jobs that name none
    :param queue: ``None`` where it isn't known yet
    :param waits: whether the task waits for the jobs
    :raises JobError: a job can't be published as it is, or can't be waited for
    """
    if not isinstance(jobs, list | tuple):
        return
    for index, item in enumerate(jobs):
        if not is_templated(item):
            _require_body(index, Job.of(item))
    if queue is None or is_templated(subject):
        return
    if not is_templated(jobs):
        _prepare(jobs, subject, queue, job_id, waits=waits)
        return
    for index, item in enumerate(jobs):
        if is_templated(item):
            continue
        try:
            _prepare([item], subject, queue, job_id, waits=waits)
        except JobError as error:
            raise type(error)(str(error).replace("job 0", f"job {index}", 1)) from None


def check_min_completed(jobs: object, min_completed: object) -> None:
    """Refuse to wait for more completions than there are jobs.

    :raises ArgumentError: there are fewer jobs in the list
    """
    if min_completed is None or is_templated(min_completed) or not isinstance(jobs, list | tuple):
        return
    if len(jobs) < parse_count("min_completed", min_completed):
        raise ArgumentError(
            f"expected at least as many jobs as min_completed, found {len(jobs)} jobs and {min_completed}, so"
            " that the task could never succeed: lower it, or add jobs"
        )


def _prepare(
    jobs: Iterable[object], subject: str | None, queue: WorkQueue, job_id: JobIdSource | None, *, waits: bool
) -> None:
    prepared = PreparedJobs(
        jobs,
        subject=subject,
        origin=None,
        batch="",
        queue=queue,
        limit=SizeLimit.of(queue),
        job_id=job_id,
        captured=queue.subjects,
    )
    if waits:
        prepared.then(refuse_schedule)
    list(prepared.batches())


def _require_body(index: int, job: Job) -> None:
    try:
        job.payload()
    except JobError as error:
        raise type(error)(f"job {index}: {error}") from None
