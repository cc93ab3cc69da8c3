"""The id of a job, the subject that it names for its end, and how often it was redriven: read alike by all parts.

A job's id is its header ``Job-Id``, else the ``id`` of a body that is a JSON object, else its ``Nats-Msg-Id``, else its
stream sequence; what is too long or isn't UTF-8 doesn't count. A redriven copy has a ``Nats-Msg-Id`` of its own, which
says how often the job was redriven; the id of the original is in ``Job-Id`` where the body doesn't say it.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from secrets import token_urlsafe
from typing import TYPE_CHECKING, Final, Literal

from airflow_provider_jetstream.jetstream.client.headers import first
from airflow_provider_jetstream.jetstream.contract import JOB_ADVISORY, JOB_ID, MSG_ID, REDRIVE_COUNT
from airflow_provider_jetstream.jetstream.origin import ShortDigests

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_REDRIVE: Final = "redrive:"
_OBJECT: Final = b"{"
_REDRIVE_ID = re.compile(r"redrive:([0-9]{1,18}):[0-9A-Za-z_-]{22}")
_COUNT = re.compile(r"[0-9]{1,18}")
# In bytes: any publisher can write what it likes, and ids go into headers and events, which have to stay small.
_MAX_FIELD = 1_000
# Jobs of earlier versions have ids that name the task, whose names may be long.
MAX_JOB_ID: Final = 10_000


def job_id_of(headers: Iterable[tuple[str, str]], body: bytes, sequence: int) -> str:
    """Return the id of a stored job.

    :param sequence: its stream sequence
    """
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

    :param job_id: the id by which it shall be known
    :param message_id: the value of ``Nats-Msg-Id``
    :param advisory: the subject that it names for its completion
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
