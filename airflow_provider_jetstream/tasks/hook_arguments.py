"""Checks of the hook's arguments, before a connection is opened."""

from __future__ import annotations

from airflow_provider_jetstream.jetstream.client.subjects import subject_problem
from airflow_provider_jetstream.jetstream.errors import ArgumentError, JobError, RedriveRequestError
from airflow_provider_jetstream.jetstream.origin import Origin
from airflow_provider_jetstream.jetstream.publishing.rate_limiter import check_rate
from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest
from airflow_provider_jetstream.tasks.arguments import check_flags, check_optional_text, check_text
from airflow_provider_jetstream.tasks.job_source import require_jobs
from airflow_provider_jetstream.tasks.known_jobs import check_subject
from airflow_provider_jetstream.tasks.template_values import parse_number, parse_time_limit


def publication_limits(
    jobs: object, subject: object, origin: object, rate: object, room_timeout: object
) -> tuple[float | None, float]:
    """Check what is to be published, and return the rate, and the seconds for which a full queue is borne.

    :raises ArgumentError: an argument can't be used
    :raises JobError: ``jobs`` holds no jobs, or a limit can't be used
    """
    require_jobs(jobs)
    check_subject(subject)
    if origin is not None and not isinstance(origin, Origin):
        raise ArgumentError(f"expected an Origin as origin, found {origin!r}: leave it out in a task")
    jobs_a_second = parse_number("rate", rate, float, JobError)
    check_rate(jobs_a_second)
    return jobs_a_second, parse_time_limit("room_timeout", room_timeout)


def single_job_id(job_id: object) -> str:
    """Return the id of a job.

    :raises JobError: it is none, or several
    """
    if isinstance(job_id, bool) or not isinstance(job_id, str | int) or not str(job_id).strip():
        raise JobError(f"expected the id of a job as job_id, found {job_id!r}: name one job")
    return str(job_id)


def optional_text(name: str, text: str | None) -> str | None:
    """Return text, or ``None``.

    :raises ArgumentError: it is neither
    """
    check_optional_text(**{name: text})
    return text


def flag(name: str, value: object) -> bool:
    """Return ``True`` or ``False``.

    :raises ArgumentError: it is neither
    """
    check_flags(**{name: value})
    return value is True


def optional_request(request: object) -> RedriveRequest | None:
    """Return a request for a redrive, or ``None``.

    :raises RedriveRequestError: it is neither
    """
    if request is not None and not isinstance(request, RedriveRequest):
        raise RedriveRequestError(
            f"expected a RedriveRequest as request, found {request!r}: make one, such as"
            ' RedriveRequest(Selection(consumer="mail"))'
        )
    return request


def stream_name(name: object) -> str:
    """Return the name of a stream.

    :raises ArgumentError: it is none
    """
    check_text(name=name)
    if problem := "it has a dot" if "." in str(name) else subject_problem(str(name), wildcards=False):
        raise ArgumentError(f"expected the name of a stream as name, found {name!r}: {problem}; correct it")
    return str(name)
