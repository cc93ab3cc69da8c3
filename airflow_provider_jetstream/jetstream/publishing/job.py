"""Jobs, as their author gives them and as they are published."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.errors import JobError, JobNotSerializableError
from airflow_provider_jetstream.jetstream.field_names import checked_field_names
from airflow_provider_jetstream.jetstream.publishing.job_fields import field_problem
from airflow_provider_jetstream.jetstream.publishing.job_keys import text_or_none
from airflow_provider_jetstream.jetstream.publishing.schedules import SCHEDULE
from airflow_provider_jetstream.jetstream.task_values import TaskValue, packed_body

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime, timedelta
    from zoneinfo import ZoneInfo

    from airflow_provider_jetstream.jetstream.publishing.job_keys import JobKey

# Made once: json.dumps makes one for every call.
_encode_json = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


@checked_field_names(JobError)
@dataclass(frozen=True, slots=True)
class Job(TaskValue):
    """One message of a work queue.

    :param body: bytes and text are published as they are, anything else as JSON
    :param subject: where it is published; the publisher's default where absent
    :param id: unique among the jobs of its task: a job that is published twice is stored once, and one with another
        body is refused. A job without an id is known by its subject, body, headers and schedule, and by the number of
        equal jobs before it
    :param advisory: a subject on which its worker reports the completion, besides the queue's own events
    :param headers: further headers; names starting with ``Nats-`` belong to the server, and those that
        the publisher or a redrive writes, such as ``Job-Id`` and ``Airflow-Task``, to them
    :param partition_key: jobs of the same key go to the same partition, whose number replaces ``{partition}`` in the
        subject
    :param at: when the server publishes the job, with a time zone; also as text such as ``"2026-11-21T09:00:00Z"``
    :param delay: how long after publishing the server publishes the job, such as ``"10m"``
    :param every: how often the server publishes the job: a duration such as ``"30s"``, a cron expression of six fields,
        or ``@daily`` and the like. A later schedule of the same id replaces it
    :param time_zone: the time zone of a cron expression, such as ``"Europe/Vienna"``; UTC where absent
    """

    body: Any
    subject: str | None = None
    id: str | None = None
    advisory: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    partition_key: str | None = None
    at: datetime | str | None = None
    delay: str | timedelta | int | None = None
    every: str | timedelta | None = None
    time_zone: str | ZoneInfo | None = None

    def __post_init__(self) -> None:
        if problem := field_problem(self.headers, self.subject, self.id, self.advisory, self.partition_key):
            raise JobError(problem)

    @property
    def schedule(self) -> tuple[object, ...] | None:
        """The fields of its schedule; ``None`` where it has none."""
        fields = (self.at, self.delay, self.every, self.time_zone)
        return None if fields == (None, None, None, None) else fields

    @classmethod
    def of(cls, item: object) -> Job:
        """Return a job as it is, or make one of a body; a dict's ``advisory`` becomes the job's."""
        if isinstance(item, Job):
            return item
        if isinstance(item, dict):
            return cls(item, advisory=text_or_none(item.get("advisory")))
        return cls(item)

    def serialize(self) -> dict[str, Any]:
        """Return what an XCom stores of the job."""
        return TaskValue.serialize(self) | {"body": packed_body(self.body)}

    def payload(self) -> bytes:
        """Encode the body.

        :raises JobNotSerializableError: it is neither bytes nor text nor JSON
        """
        if isinstance(self.body, bytes):
            return self.body
        try:
            if isinstance(self.body, str):
                return self.body.encode()
            return _encode_json(self.body).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise JobNotSerializableError(
                f"expected a body of bytes, text or JSON values, found {type(self.body).__name__}: {error};"
                " convert it before publishing"
            ) from None


@dataclass(frozen=True, slots=True)
class OutgoingJob:
    """A job with its subject, id and headers.

    :param body: its encoded body; ``None`` where it can't be encoded
    :param key: what identifies it among the jobs of its task
    :param job_id: the id by which it is known
    :param message_id: the value of ``Nats-Msg-Id``
    :param api_level: the JetStream API level that the server must have
    :param schedules: the stream that stores it, where it is a schedule
    """

    job: Job
    subject: str
    body: bytes | None
    key: JobKey
    job_id: str
    message_id: str
    headers: dict[str, str]
    api_level: int = 0
    schedules: str | None = None

    @property
    def scheduled(self) -> bool:
        """Whether the server stores a schedule and publishes the job later."""
        return SCHEDULE in self.headers
