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
_STORE_FAILED: Final = 10077
_FULL: Final = {
    _STORE_FAILED: "{stream} is full",
    10002: "{stream} can't store it, since its account may store no more",
    10023: "{stream} can't store it, since its server may store no more",
    10028: "{stream} can't store it, since its server may store no more in memory",
    10047: "{stream} can't store it, since its server may store no more",
}
# By error code: what passes without anybody's help, besides what the server marks by a status. Its cluster has no
# leader, a vote failed, an earlier attempt is being stored, and too much is on its way.
_PASSING: Final = {10004, 10008, 10009, 10041, 10158, 10167}
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
    if is_passing(refusal):
        return UnreachableError(f"{stream} can't store it just now ({description}): try again")
    return JobError(f"{stream} refused it: {description} (error {refusal.err_code})")


def is_full(refusal: ApiError) -> bool:
    """Return whether there is no room for a job now; there may be later."""
    # A store fails for other reasons too, such as a server that shuts down.
    return refusal.err_code in _FULL and (
        refusal.err_code != _STORE_FAILED or refusal.description.startswith("maximum")
    )


def is_passing(refusal: ApiError) -> bool:
    """Return whether the server can't store a job just now, as while it shuts down or elects a leader."""
    return not is_full(refusal) and (
        refusal.err_code in _PASSING or refusal.status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS)
    )


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
