"""The death of one job, in the form that workers record and scans find."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.task_values import TaskReport

if TYPE_CHECKING:
    from datetime import datetime

_VARYING = re.compile(r"0x[0-9a-fA-F]+|[0-9a-fA-F]{8,}(?:-[0-9a-fA-F]{4,})*|\d+")
_FINGERPRINT_DIGITS = 12
_FINGERPRINT_TEXT = 200


class Reason(StrEnum):
    """Why a job is dead."""

    MAX_DELIVERIES = "max_deliveries"
    """It used up its deliveries."""
    TERMINATED = "terminated"
    """A worker terminated it."""
    DEADLINE = "deadline"
    """It used up its deliveries, and the last one ran past its deadline."""
    EXPIRED = "expired"
    """Its deadline had passed, before a worker started it or while one had it."""
    ORPHAN = "orphan"
    """It is dead and has no advisory: found by counting."""
    UNDELIVERABLE = "undeliverable"
    """It matches no consumer's filter: not dead, but never delivered."""
    UNACCOUNTED = "unaccounted"
    """It is gone without evidence of its end, so it may have been done; a letter only where a request names it."""


@dataclass(frozen=True, slots=True)
class Death(TaskReport):
    """What is known about the death of one job.

    :param stream: the job's stream
    :param created: when that stream was created, in the server's own text; empty where the writer didn't know
    :param sequence: the job's stream sequence; with the two above its identity
    :param consumer: the consumer that delivered it; ``None`` where none did
    :param reason: why it is dead
    :param died_at: when it failed for the last time
    :param first_failed_at: when it failed first, where a worker recorded it
    :param deliveries: how often it was delivered, where that is known
    :param explanation: the worker's own text
    :param error_class: the error's type, where a worker recorded it
    :param error_message: the error's text, where a worker recorded it
    :param traceback_digest: equal for failures of the same kind at the same line, where a worker recorded it
    :param error_place: where the handler failed, as ``module:function:line``
    :param traceback: the handler's own functions on the way there, each as ``module:function:line``, outermost first
    :param worker: the worker that had the last delivery, where it recorded that
    :param seconds: how long the handler ran at the last delivery, where a worker recorded it
    """

    stream: str
    created: str
    sequence: int
    consumer: str | None
    reason: Reason
    died_at: datetime
    first_failed_at: datetime | None = None
    deliveries: int | None = None
    explanation: str | None = None
    error_class: str | None = None
    error_message: str | None = None
    traceback_digest: str | None = None
    error_place: str | None = None
    traceback: tuple[str, ...] = ()
    worker: str | None = None
    seconds: float | None = None

    @property
    def fingerprint(self) -> str:
        """A digest that letters of the same cause share: numbers and ids in the error's text don't count."""
        # Cut after numbers are masked: their length would move the cut.
        text = _VARYING.sub("#", self.error_message or self.explanation or "")[:_FINGERPRINT_TEXT]
        parts = (self.reason, self.consumer or "", self.error_class or "", text)
        return sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:_FINGERPRINT_DIGITS]
