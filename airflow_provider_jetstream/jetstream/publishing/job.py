"""Jobs, as their author gives them and as they are published."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from uuid import UUID

from airflow_provider_jetstream.jetstream.errors import JobError, JobNotSerializableError
from airflow_provider_jetstream.jetstream.field_names import checked_field_names
from airflow_provider_jetstream.jetstream.task_values import TaskValue, packed_body

if TYPE_CHECKING:
    from datetime import datetime, timedelta
    from zoneinfo import ZoneInfo

JobIdSource: TypeAlias = "str | Callable[[Any], object]"

# What is stored of the digest of a body.
BODY_DIGEST_BYTES: Final = 8
# Numbers are common as ids and keys, and mean their text.
_TYPES: Final[dict[str, tuple[type, ...]]] = {"id": (str, int, UUID), "partition_key": (str, int)}
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
            # A header's value isn't sent with white space around it.
            advisory = item.get("advisory")
            return cls(item, advisory=None if advisory is None else str(advisory).strip() or None)
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
    :param given_id: the id that its author gave it; ``None`` for a job that is known by its content
    :param job_id: the id by which it is known
    :param message_id: the value of ``Nats-Msg-Id``
    :param api_level: the JetStream API level that the server must have
    :param schedules: the stream that stores it, where it is a schedule
    """

    job: Job
    subject: str
    body: bytes | None
    given_id: str | None
    job_id: str
    message_id: str
    headers: dict[str, str]
    api_level: int = 0
    schedules: str | None = None

    @property
    def scheduled(self) -> bool:
        """Whether the server stores a schedule and publishes the job later."""
        return self.schedules is not None

    @property
    def body_digest(self) -> bytes:
        """The beginning of the SHA-256 of its body."""
        return sha256(self.body or b"").digest()[:BODY_DIGEST_BYTES]


def field_problem(headers: object, subject: object, job_id: object, advisory: object, key: object) -> str | None:
    """Return what is wrong with the fields of a job, and what to do; ``None`` where nothing is.

    What a template or another program gives later, an object with a method ``resolve``, is left to it.
    """
    for value in (subject, job_id, advisory, key):
        if value is not None and (type(value) is not str or not value.strip()):
            texts = {"subject": subject, "id": job_id, "advisory": advisory, "partition_key": key}
            if problem := _text_problem(texts):
                return problem
            break
    if isinstance(job_id, str) and (problem := blank_problem(job_id)):
        return problem
    if not isinstance(headers, Mapping) and not hasattr(headers, "resolve"):
        return f"expected headers of a job as a dict of names and texts, found {headers!r}: make a dict of it"
    return None


def blank_problem(job_id: str) -> str | None:
    """Return what is wrong with an id that begins or ends with white space, which no header holds."""
    if job_id == job_id.strip():
        return None
    return f"expected the id of a job without white space at its ends, found {job_id!r}: strip it"


def _text_problem(texts: Mapping[str, object]) -> str | None:
    for name, value in texts.items():
        if value is None or hasattr(value, "resolve"):
            continue
        if isinstance(value, bool) or not isinstance(value, _TYPES.get(name, (str,))):
            return f"expected text as {name} of a job, found {value!r}: convert it"
        if not str(value).strip():
            return f"expected text as {name} of a job, found {value!r}: leave {name} out where there is none"
    return None
