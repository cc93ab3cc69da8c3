"""Unique jobs: of the jobs of one subject with one key, at most one waits, runs or is a dead letter at a time.

The key is the last token of the job's subject, and the job is published on the condition that its stream stores no
message of that subject. The server checks the condition as it stores the job, so that of any number of publishers one
succeeds. A work queue stores a job until it has ended, and a dead letter until somebody brings it back or discards it:
the stream itself is the record of the keys in use. A dead letter whose worker terminated it has left the stream; it is
looked for before the job is sent.

The condition names its subject. The archive gets a copy of the job with all of its headers; without the name, the
condition would be about the archive's own subject, and the archive would refuse the second job of a key.

Protocol: NATS ADR-22, ``Nats-Expected-Last-Subject-Sequence`` and, of nats-server 2.11,
``Nats-Expected-Last-Subject-Sequence-Subject``.
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.client.publish_ack import WRONG_LAST_SEQUENCE
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import JOB_UNIQUE
from airflow_provider_jetstream.jetstream.errors import JobError
from airflow_provider_jetstream.jetstream.line_text import shown_value

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.errors import ApiError
    from airflow_provider_jetstream.jetstream.publishing.job import Job
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

# The JetStream API level of nats-server 2.11.
UNIQUE_LEVEL: Final = 1
_CONDITION: Final = "Nats-Expected-Last-Subject-Sequence"
# In bytes.
_MAX_KEY: Final = 1_000
_DIGEST: Final = "sha256-"
_TOKEN: Final = re.compile(r"(?!sha256-)[0-9A-Za-z_-]{1,64}")
_SEQUENCE: Final = re.compile(r"[0-9]{1,20}$")


def unique_subject(index: int, job: Job, subject: str, queue: WorkQueue | None) -> str:
    """Return the subject of a unique job.

    :param index: the job's position, which an error names
    :param subject: the subject that it would have without a key
    :raises JobError: the job has a schedule; or no queue is known, or it has no consumer of the subject, or no archive,
        which tells the letters that have left the stream
    """
    key = job.unique or ""
    if problem := _key_problem(key):
        raise JobError(f"job {index} has the unique key {shown_value(key)}: {problem}")
    if job.schedule is not None:
        raise JobError(
            f"job {index} has the unique key {key!r} and a schedule: expected one of them, since the server doesn't"
            " know which jobs are stored when it makes a scheduled one; publish it when it is due"
        )
    if queue is None:
        raise JobError(f"job {index} has the unique key {key!r}: expected the queue, found none; pass it on")
    target = f"{subject}.{unique_token(key)}"
    if not any(covered_by_any(consumer.filter_subjects or queue.subjects, target) for consumer in queue.consumers):
        raise JobError(
            f"job {index} has the unique key {key!r}, which is the last token of its subject {target}: expected a"
            f" consumer of {queue.name} with such a filter, found none; declare {subject}.* as a subject of the queue"
            " and as a filter"
        )
    if queue.dead_letters and not queue.archive:
        raise JobError(
            f"job {index} has the unique key {key!r}: expected {queue.name} to declare an archive, found none; declare"
            " archive: true, since a dead letter that its worker terminated would lose its key"
        )
    return target


def _key_problem(key: str) -> str | None:
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        return "expected Unicode text, which a header can hold"
    if size > _MAX_KEY or not key.isprintable() or key != key.strip():
        return (
            f"expected text of at most {_MAX_KEY} bytes in one line, without white space at its ends, as a header holds"
            " it; use a digest"
        )
    return None


def unique_token(key: str) -> str:
    """Return a key as a token of a subject: itself where it can be one, else its SHA-256."""
    return key if _TOKEN.fullmatch(key) else f"{_DIGEST}{sha256(key.encode()).hexdigest()[:32]}"


def unique_headers(key: str, subject: str) -> dict[str, str]:
    """Return the headers of a unique job.

    :param subject: its subject, with the key
    """
    return {JOB_UNIQUE: key, _CONDITION: "0", f"{_CONDITION}-Subject": subject}


def is_held(refusal: ApiError) -> bool:
    """Return whether a stream refused a unique job, since it stores a job of the subject."""
    return refusal.err_code in WRONG_LAST_SEQUENCE


def holder(refusal: ApiError) -> int:
    """Return the sequence of the job that has the key; 0 where the server doesn't say it."""
    found = _SEQUENCE.search(refusal.description)
    return int(found[0]) if found else 0
