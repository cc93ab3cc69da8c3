"""Finds out why no stream answers on a subject: none captures it, or the one that does is away for a moment."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.client.diagnostics import not_found
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    JetStreamProviderError,
    NotFoundError,
    UnreachableError,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.connection import Connection

# Seconds for which an answer about a subject holds.
_VALID: Final = 1.0
_TIME_LIMIT: Final = 1.0
_MAX_SUBJECTS: Final = 1_000


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
        """Return the error of a subject of which the server has just said that no stream captures it."""
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
