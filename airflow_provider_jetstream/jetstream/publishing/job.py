"""Jobs, as their author gives them and as they are published, and what identifies them, read alike by all parts.

A job's id is its header ``Job-Id``, else the ``id`` of a body that is a JSON object, else its ``Nats-Msg-Id``, else its
stream sequence; what is too long or isn't UTF-8 doesn't count. A redriven copy has a ``Nats-Msg-Id`` of its own, which
says how often the job was redriven; the id of the original is in ``Job-Id`` where the body doesn't say it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from secrets import token_urlsafe
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias
from uuid import UUID

from airflow_provider_jetstream.jetstream.client.headers import first
from airflow_provider_jetstream.jetstream.contract import JOB_ADVISORY, JOB_ID, MSG_ID, REDRIVE_COUNT
from airflow_provider_jetstream.jetstream.errors import JobError, JobNotSerializableError
from airflow_provider_jetstream.jetstream.field_names import checked_field_names
from airflow_provider_jetstream.jetstream.task_values import TaskValue, packed_body

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime, timedelta
    from zoneinfo import ZoneInfo

    from airflow_provider_jetstream.jetstream.origin import ShortDigests

JobIdSource: TypeAlias = "str | Callable[[Any], object]"

_REDRIVE: Final = "redrive:"
_OBJECT: Final = b"{"
_REDRIVE_ID = re.compile(r"redrive:([0-9]{1,18}):[0-9A-Za-z_-]{22}")
_COUNT = re.compile(r"[0-9]{1,18}")
# In bytes: any publisher can write what it likes, and ids go into headers and events, which have to stay small.
_MAX_FIELD = 1_000
# Jobs of earlier versions have ids that name the task, whose names may be long.
MAX_JOB_ID: Final = 10_000
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
    :param unique: a key, of which at most one job of the subject waits, runs or is a dead letter at a time: another one
        isn't stored. It becomes the last token of the subject
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
    unique: str | None = None
    at: datetime | str | None = None
    delay: str | timedelta | int | None = None
    every: str | timedelta | None = None
    time_zone: str | ZoneInfo | None = None

    def __post_init__(self) -> None:
        if problem := field_problem(
            self.headers, self.subject, self.id, self.advisory, self.partition_key, self.unique
        ):
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


def field_problem(
    headers: object, subject: object, job_id: object, advisory: object, key: object, unique: object
) -> str | None:
    """Return what is wrong with the fields of a job, and what to do; ``None`` where nothing is.

    What a template or another program gives later, an object with a method ``resolve``, is left to it.
    """
    for value in (subject, job_id, advisory, key, unique):
        if value is not None and (type(value) is not str or not value.strip()):
            texts = {
                "subject": subject,
                "id": job_id,
                "advisory": advisory,
                "partition_key": key,
                "unique": unique,
            }
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


def job_id_of(headers: Iterable[tuple[str, str]], body: bytes, sequence: int) -> str:
    """Return the id of a stored job."""
    return stated_job_id(headers, body) or str(sequence)


def delivered_job_id(headers: Mapping[str, str], body: bytes, sequence: int) -> str:
    """Return what :func:`job_id_of` does, for a job whose headers were read into the first value of each name."""
    message_id = headers.get(MSG_ID)
    # Most jobs have this form, and a worker looks at each of its jobs.
    if message_id and message_id.isascii() and JOB_ID not in headers and not body.startswith(_OBJECT):
        if len(message_id) <= _MAX_FIELD and not message_id.startswith(_REDRIVE):
            return message_id
        return str(sequence)
    return job_id_of(headers.items(), body, sequence)


def stated_job_id(headers: Iterable[tuple[str, str]], body: bytes) -> str | None:
    """Return the id that a job's headers or its body state; ``None`` for a job that has only its sequence."""
    pairs = tuple(headers)
    return header_job_id(pairs) or body_field(body, "id") or _publication_id(pairs)


def identity_headers(
    *, job_id: str, message_id: str, advisory: str | None, body: bytes, scheduled: bool
) -> dict[str, str]:
    """Return the headers that identify a job to be published; what its body states needs no header.

    :param scheduled: whether the server makes the job, without the publisher's ``Nats-Msg-Id``
    """
    headers = {MSG_ID: message_id}
    if job_id != (body_field(body, "id") or (None if scheduled else message_id)):
        headers[JOB_ID] = job_id
    if advisory and advisory != body_field(body, "advisory"):
        headers[JOB_ADVISORY] = advisory
    return headers


def advisory_of(headers: Iterable[tuple[str, str]], body: bytes) -> str | None:
    """Return the subject that a job names for its completion, in its header ``Job-Advisory`` or in its body."""
    return first(headers, JOB_ADVISORY) or body_field(body, "advisory")


def delivered_advisory(headers: Mapping[str, str], body: bytes) -> str | None:
    """Return what :func:`advisory_of` does, for a job whose headers were read into the first value of each name."""
    return headers.get(JOB_ADVISORY) or (body_field(body, "advisory") if body.startswith(_OBJECT) else None)


def body_field(body: bytes, name: Literal["id", "advisory"]) -> str | None:
    """Return a field of a body that is a JSON object: text or a whole number, ``None`` for anything else."""
    # Most bodies have no such field, and finding that out costs much less than parsing them.
    if not body.startswith(_OBJECT) or b'"%b"' % name.encode() not in body:
        return None
    try:
        value = json.loads(body).get(name)
        if not isinstance(value, str | int) or isinstance(value, bool):
            return None
        # A subject has no white space around it; an id is what stands there, for workers of any make.
        text = str(value) if name == "id" else str(value).strip()
    except (ValueError, RecursionError):
        return None
    return text if text.strip() and _is_usable(text) else None


def redrive_message_id(stream: str, sequence: int, time: str, redrives: int) -> str:
    """Return the ``Nats-Msg-Id`` of the new job of a dead letter, which only this letter has.

    :param time: when the letter's job was stored, in the server's own text
    :param redrives: how often the new job was redriven
    """
    return f"{_REDRIVE}{redrives}:{_digests(stream).of(sequence, time)}"


def other_redrive_id(message_id: str) -> str:
    """Return a ``Nats-Msg-Id`` for the same new job that nobody can know, of the same form."""
    counted, _, digest = message_id.rpartition(":")
    return f"{counted}:{token_urlsafe(len(digest))[: len(digest)]}"


@lru_cache(maxsize=16)
def _digests(stream: str) -> ShortDigests:
    # Only redrives need it, and DAG files import jobs.
    from airflow_provider_jetstream.jetstream.origin import ShortDigests

    return ShortDigests(stream)


def redrives_of(headers: Iterable[tuple[str, str]]) -> int:
    """Return how often a job was redriven: from its own header, or from its message id where that had no room."""
    pairs = tuple(headers)
    if (count := first(pairs, REDRIVE_COUNT)) is None:
        match = _REDRIVE_ID.fullmatch(first(pairs, MSG_ID) or "")
        return int(match[1]) if match else 0
    # A number of thousands of digits couldn't be written as text.
    return int(count) if _COUNT.fullmatch(count) else 0


def header_job_id(headers: Iterable[tuple[str, str]]) -> str | None:
    """Return the id that a job's header ``Job-Id`` states, if it states one."""
    job_id = first(headers, JOB_ID)
    return job_id if job_id and _is_exact(job_id) and _is_usable(job_id, MAX_JOB_ID) else None


def _publication_id(headers: tuple[tuple[str, str], ...]) -> str | None:
    message_id = first(headers, MSG_ID)
    # The id of a redriven copy is another one for each redrive.
    if message_id is None or message_id.startswith(_REDRIVE) or not _is_exact(message_id):
        return None
    return message_id if _is_usable(message_id) else None


def _is_exact(text: str) -> bool:
    # Some clients read it in the place of what isn't UTF-8, and all parts have to read the same id.
    return "\ufffd" not in text


def _is_usable(text: str, most: int = _MAX_FIELD) -> bool:
    if text.isascii():
        return 0 < len(text) <= most
    try:
        # What isn't UTF-8 can't be sent in an event.
        return 0 < len(text.encode()) <= most
    except UnicodeEncodeError:
        return False
