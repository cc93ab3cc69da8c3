"""Models of jobs that are no dead letters: pending ones and those in flight."""

from datetime import datetime
from typing import Literal, TypeAlias

from pydantic import Field

from airflow_provider_jetstream.plugins.monitor.models.base import MonitorModel
from airflow_provider_jetstream.plugins.monitor.models.letters import OriginOfLetter, Payload

JobState: TypeAlias = Literal["pending", "delivered", "unserved"]


class JobLine(MonitorModel):
    """A stored job.

    :param sequence: its stream sequence
    :param job_id: its id, or its sequence where it has none
    :param consumer: the consumer whose filter it matches; ``null`` where none does
    :param state: ``pending`` never delivered; ``delivered`` delivered at least once and still stored: in flight, or it
        waits for its next delivery, or it is dead; ``unserved`` matches no consumer
    :param stored_at: when it was stored
    :param size: bytes of its body
    :param redrives: how often it was redriven before
    :param origin: the task that published it
    """

    sequence: int
    job_id: str
    subject: str
    consumer: str | None
    state: JobState
    stored_at: datetime
    size: int
    redrives: int
    origin: OriginOfLetter | None


class JobPage(MonitorModel):
    """A page of a queue's jobs, by sequence.

    :param total: how many jobs there are in that state, as the consumers count; of delivered ones those in flight
    :param jobs: those of this page; without those of DAGs whose task instances the user may not see
    :param next_after: ``after`` of the next page; ``null`` on the last one
    :param not_shown: how many jobs of the page are left out
    """

    state: JobState
    total: int
    jobs: list[JobLine] = Field(default_factory=list)
    next_after: int | None = None
    not_shown: int = 0


class JobDetail(MonitorModel):
    """The details of a job.

    :param hidden: whether body and headers are left out, since the user may not see them
    :param payload: ``null`` where hidden
    :param headers: in order, name and value; empty where hidden
    """

    job: JobLine
    hidden: bool
    payload: Payload | None
    headers: list[tuple[str, str]]
