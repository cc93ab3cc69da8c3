"""Why a job isn't stored: the errors of jobs that the server refuses, or would, and of subjects without an answer."""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.client.diagnostics import not_found
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    JetStreamProviderError,
    JobError,
    JobTooLargeError,
    NotFoundError,
    QueueFullError,
    ServerTooOldError,
    UnreachableError,
)
from airflow_provider_jetstream.jetstream.publishing.schedules import ONCE_LEVEL, SCHEDULE
from airflow_provider_jetstream.jetstream.publishing.unique import UNIQUE_LEVEL

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.connection import Connection
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
# Seconds for which an answer about a subject holds.
_VALID: Final = 1.0
_TIME_LIMIT: Final = 1.0
_MAX_SUBJECTS: Final = 1_000


def too_old(job: OutgoingJob, connection: Connection) -> ServerTooOldError:
    """Return the error of a job of which the server doesn't know what it asks for."""
    version = ".".join(map(str, connection.server_version))
    if job.api_level == UNIQUE_LEVEL:
        return ServerTooOldError(
            f"expected nats-server 2.11 or later for the unique key {job.job.unique!r}, found {version}: upgrade every"
            " server, or publish it without a key"
        )
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
        return UnreachableError(
            f"{stream} can't store it just now ({description}, error {refusal.err_code}): try again"
        )
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
        f"{full} ({refusal.description}, error {refusal.err_code}){waited}: let workers or a redrive free space, or"
        " raise the limit, then try again"
    )


def too_large(limit: str) -> JobTooLargeError:
    """Return the error of a job that exceeds a limit."""
    return JobTooLargeError(
        f"body and headers exceed {limit}: send a reference instead of the data, or raise the limit"
    )


class UnansweredSubjects:
    """The subjects on which no stream answered, and why.

    A server in lame duck mode, one that is just starting, and a stream without a leader look like a stream that doesn't
    exist: only JetStream's API distinguishes them. It is silent while the server shuts down.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._reasons: dict[str, tuple[float, JetStreamProviderError]] = {}
        self._silent_until = float("-inf")

    async def reason(self, subject: str, stream: str | None) -> JetStreamProviderError:
        """Return why no stream answers on a subject.

        :param stream: the queue's, where it is known: a publisher may read no other
        :return: a :class:`NotFoundError` where the server says that no stream captures it
        """
        if known := self._known(subject):
            return known
        reason = await self._look_up(subject, stream)
        # Jobs may have a subject each.
        if len(self._reasons) >= _MAX_SUBJECTS:
            self._reasons.clear()
        self._reasons[subject] = (time.monotonic() + _VALID, reason)
        return reason

    def missing(self, subject: str) -> NotFoundError | None:
        """Return the error for a subject that no stream captures, as the server has just said."""
        # Called for every job.
        known = self._known(subject) if self._reasons else None
        return known if isinstance(known, NotFoundError) else None

    def _known(self, subject: str) -> JetStreamProviderError | None:
        valid_until, reason = self._reasons.get(subject, (0.0, None))
        return reason if time.monotonic() < valid_until else None

    async def _look_up(self, subject: str, stream: str | None) -> JetStreamProviderError:
        if time.monotonic() < self._silent_until:
            return _unknown(subject, "JetStream's API doesn't answer")
        try:
            capturing = await self._capturing(subject, stream)
        except JetStreamProviderError as error:
            self._silent_until = time.monotonic() + _VALID
            return _unknown(subject, error)
        if capturing is None:
            return NotFoundError(f"no stream captures {subject}: provision the queue first, or check the subject")
        return UnreachableError(
            f"{capturing} captures {subject} and doesn't answer just now: its server shuts down, or it elects a leader;"
            " try again"
        )

    async def _capturing(self, subject: str, stream: str | None) -> str | None:
        """Return the name of the stream that captures a subject."""
        if stream is None:
            answer = await self._connection.api("STREAM.NAMES", {"subject": subject}, time_limit=_TIME_LIMIT)
            names: list[str] = answer.get("streams") or []
            return names[0] if names else None
        try:
            answer = await self._connection.api(f"STREAM.INFO.{stream}", time_limit=_TIME_LIMIT)
        except ApiError as error:
            if isinstance(not_found(error, f"stream {stream}"), NotFoundError):
                return None
            raise
        return stream if covered_by_any(answer["config"].get("subjects") or (), subject) else None


def _unknown(subject: str, cause: object) -> UnreachableError:
    return UnreachableError(
        f"no stream answers on {subject} just now, and whether one captures it isn't known ({cause}): try again, and"
        " check the subject if it stays so"
    )
