"""A dead letter: the job, its death and its origin."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.client.headers import first
from airflow_provider_jetstream.jetstream.contract import (
    AIRFLOW_TASK,
    DAG_ID,
    MAP_INDEX,
    REDRIVE_SEQUENCE,
    REDRIVE_STREAM,
    RUN_ID,
    TASK_ID,
)
from airflow_provider_jetstream.jetstream.origin import Origin
from airflow_provider_jetstream.jetstream.publishing.job import job_id_of, redrives_of
from airflow_provider_jetstream.jetstream.task_values import TaskReport

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.client.headers import Pairs
    from airflow_provider_jetstream.jetstream.dead_letters.death import Death

_NONE_KNOWN: Final[Mapping[str, Origin]] = MappingProxyType({})


class BodySource(StrEnum):
    """Where a dead letter's body was found."""

    QUEUE = "queue"
    COPY = "copy"
    ARCHIVE = "archive"


@dataclass(frozen=True, slots=True)
class DeadLetter(TaskReport):
    """A job whose death is proved, with everything that a redrive needs.

    :param death: what is known about its death
    :param subject: its subject
    :param body: its body
    :param headers: its headers as they were stored: name and value in order; a name may come more than once
    :param time: when it was stored, in the server's own text
    :param source: where the body was found
    :param entries: the sequences of its entries in the dead letter queue
    :param preserved: whether the dead letter queue has a copy of the body
    :param ready_at: when no worker can be working on it any more
    :param copy_sequence: the new job's sequence, where a redrive was cut off after it stored the copy
    :param copy_stream: the new job's stream, where it isn't the letter's own
    :param parked: why it is out of circulation, if it is
    :param origin: the Airflow task that published it, if one did and it is known
    :param consumer_absent: whether it is stored and no consumer takes its subject any more: the one that delivered it
        is gone, or takes other subjects. A consumer that is created for the subject would run it again
    :param kept_since: when it died, or was parked, by the server's clock; ``None`` where no scan says so
    :param foreign_subject: whether nothing but a record states its subject, which isn't one of the consumer's whose
        worker wrote the record: a redrive has to name the subject
    """

    death: Death
    subject: str
    body: bytes
    headers: Pairs
    time: str
    source: BodySource
    entries: tuple[int, ...]
    preserved: bool
    ready_at: datetime
    copy_sequence: int | None = None
    copy_stream: str | None = None
    parked: str | None = None
    origin: Origin | None = None
    consumer_absent: bool = False
    foreign_subject: bool = False
    kept_since: datetime | None = None

    @property
    def sequence(self) -> int:
        """The job's stream sequence."""
        return self.death.sequence

    @property
    def job_id(self) -> str:
        """The job's own id, or its sequence where it has none."""
        return job_id_of(self.headers, self.body, self.sequence)

    @property
    def redrives(self) -> int:
        """How often it was redriven."""
        return redrives_of(self.headers)


def task_key_of(headers: Pairs) -> str | None:
    """Return the key of the Airflow task that published a job, if the job's headers hold one."""
    return first(headers, AIRFLOW_TASK)


def copied_from(letter: DeadLetter) -> int | None:
    """Return the sequence of the letter from which a letter's job was copied, if its headers name one of this queue.

    Where the copy had no room for the queue's name, the letter may have been one of another queue.
    """
    if not letter.headers:
        return None
    if first(letter.headers, REDRIVE_STREAM) not in (None, letter.death.stream):
        return None
    sequence = _number(first(letter.headers, REDRIVE_SEQUENCE), 0)
    return sequence if 0 < sequence < letter.sequence else None


def origin_of(headers: Pairs, known: Mapping[str, Origin] = _NONE_KNOWN) -> Origin | None:
    """Return the Airflow task that published a job, if one did and it is known.

    :param known: tasks by their keys; where a job has a key, nothing else in its headers names the task
    """
    if not headers:
        return None
    if (key := task_key_of(headers)) is not None:
        return known.get(key)
    dag_id = first(headers, DAG_ID)
    if dag_id is None:
        return None
    run_id, task_id = first(headers, RUN_ID) or "", first(headers, TASK_ID) or ""
    return Origin(dag_id, run_id, task_id, _number(first(headers, MAP_INDEX), -1))


def _number(text: str | None, default: int) -> int:
    try:
        return default if text is None else int(text)
    except ValueError:
        return default
