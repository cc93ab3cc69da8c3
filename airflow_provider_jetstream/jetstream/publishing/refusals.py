"""The errors of jobs that the server refuses, or would."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.errors import (
    JobError,
    JobTooLargeError,
    QueueFullError,
    ServerTooOldError,
    UnreachableError,
)
from airflow_provider_jetstream.jetstream.publishing.schedules import ONCE_LEVEL, SCHEDULE

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.errors import ApiError, JetStreamProviderError
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob

# By error code: what is full. The limits of an account and of a server hold for all their streams together.
_FULL: Final = {
    10077: "{stream} is full",
    10002: "{stream} can't store it, since its account may store no more",
    10023: "{stream} can't store it, since its server may store no more",
}
_MESSAGE_TOO_LARGE: Final = 10054


def too_old(job: OutgoingJob, connection: Connection) -> ServerTooOldError:
    """Return the error of a scheduled job that the server would never make."""
    version = ".".join(map(str, connection.server_version))
    return ServerTooOldError(
        f"expected nats-server {'2.12' if job.api_level == ONCE_LEVEL else '2.14'} or later for"
        f" {job.headers[SCHEDULE]!r}, found {version}: upgrade every server, or publish it when it is due"
    )


def job_error(refusal: ApiError) -> JetStreamProviderError:
    """Return the error of a job that a stream refused."""
    stream, description = refusal.stream, refusal.description
    if is_full(refusal):
        return QueueFullError(full_text(refusal))
    if refusal.err_code == _MESSAGE_TOO_LARGE:
        return too_large(f"max_msg_size of {stream}")
    if refusal.status == HTTPStatus.SERVICE_UNAVAILABLE:
        return UnreachableError(f"{stream} can't store it just now ({description})")
    return JobError(f"{stream} refused it: {description} (error {refusal.err_code})")


def is_full(refusal: ApiError) -> bool:
    """Return whether there is no room for a job now; there may be later."""
    return refusal.err_code in _FULL


def is_full_subject(refusal: ApiError) -> bool:
    """Return whether there is no room on the job's subject only."""
    return is_full(refusal) and "per subject" in refusal.description


def full_text(refusal: ApiError, waited: str = "") -> str:
    """Return what is wrong with a full queue.

    :param waited: what was waited for
    """
    full = _FULL[refusal.err_code].format(stream=refusal.stream)
    return (
        f"{full} ({refusal.description}){waited}: let workers or a redrive free space, or raise the"
        " limit, then try again"
    )


def too_large(limit: str) -> JobTooLargeError:
    """Return the error of a job that exceeds a limit."""
    return JobTooLargeError(
        f"body and headers exceed {limit}: send a reference instead of the data, or raise the limit"
    )
