"""A dead letter: what died, where it came from, why, and how it can be told from every other one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.headers import first
from airflow_provider_jetstream.jetstream.jobs import Origin
from airflow_provider_jetstream.jetstream.names import DAG_ID, JOB_ID, MAP_INDEX, REDRIVE_COUNT, RUN_ID, TASK_ID

if TYPE_CHECKING:
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.headers import Pairs

_VARYING = re.compile(r"0x[0-9a-fA-F]+|[0-9a-fA-F]{8,}(?:-[0-9a-fA-F]{4,})*|\d+")
_FINGERPRINT_DIGITS = 12
_FINGERPRINT_TEXT = 200


class Reason(StrEnum):
    """Why a job is dead."""

    MAX_DELIVERIES = "max_deliveries"
    """It used up its deliveries."""
    TERMINATED = "terminated"
    """A worker gave it up."""
    DEADLINE = "deadline"
    """It used up its deliveries, and the last one ran past its deadline."""
    EXPIRED = "expired"
    """Its time was over, before a worker started it or while one had it."""
    ORPHAN = "orphan"
    """It is dead, but nobody told: found by counting."""
    UNDELIVERABLE = "undeliverable"
    """No consumer's filter matches it; not dead, but nobody will ever do it."""


class Source(StrEnum):
    """Where a dead letter's body was found."""

    QUEUE = "queue"
    COPY = "copy"
    ARCHIVE = "archive"


@dataclass(frozen=True, slots=True)
class Death:
    """What is known about the end of one job.

    :param stream: the job's stream
    :param created: when that stream was created, in the server's own text; empty where the teller didn't know
    :param sequence: the job's stream sequence; with the two above its identity
    :param consumer: who delivered it; ``None`` where nobody did
    :param reason: why it is dead
    :param died_at: its last failure
    :param first_failed_at: its first failure, where a worker told
    :param deliveries: how often it was delivered, where that is known
    :param explanation: the worker's own words
    :param error_class: the error's type, where a worker told
    :param error_message: the error's text, where a worker told
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

    @property
    def fingerprint(self) -> str:
        """The same for letters that died of the same thing: numbers and ids in the texts don't count."""
        # Cut after numbers are masked, since their length would move the cut.
        told = _VARYING.sub("#", self.error_message or self.explanation or "")[:_FINGERPRINT_TEXT]
        parts = (self.reason, self.consumer or "", self.error_class or "", told)
        return sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:_FINGERPRINT_DIGITS]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A job that is dead beyond doubt, with everything needed to bring it back.

    :param death: what is known about its end
    :param subject: its subject
    :param body: its body
    :param headers: its headers as they were stored: name and value in order; a name may come more than once
    :param time: when it was stored, in the server's own text
    :param source: where the body was found
    :param entries: where the dead letter queue holds something about it
    :param kept: whether the dead letter queue holds the body too
    :param ready_at: from when on no worker can be presumed to be still at it
    :param copied_as: the new job's sequence, where a redrive was cut off after the copy was stored
    :param parked: why it was taken out of circulation, if it was
    """

    death: Death
    subject: str
    body: bytes
    headers: Pairs
    time: str
    source: Source
    entries: tuple[int, ...]
    kept: bool
    ready_at: datetime
    copied_as: int | None = None
    parked: str | None = None

    @property
    def sequence(self) -> int:
        """The job's stream sequence."""
        return self.death.sequence

    @property
    def job_id(self) -> str:
        """The job's own id, or its sequence where it has none."""
        return first(self.headers, JOB_ID) or str(self.sequence)

    @property
    def redrives(self) -> int:
        """How often it was redriven before."""
        return max(0, _number(first(self.headers, REDRIVE_COUNT), 0))

    @property
    def origin(self) -> Origin | None:
        """The Airflow task that published it, if one did."""
        dag_id = first(self.headers, DAG_ID)
        if dag_id is None:
            return None
        run_id, task_id = first(self.headers, RUN_ID) or "", first(self.headers, TASK_ID) or ""
        return Origin(dag_id, run_id, task_id, _number(first(self.headers, MAP_INDEX), -1))


def _number(text: str | None, otherwise: int) -> int:
    try:
        return otherwise if text is None else int(text)
    except ValueError:
        return otherwise
