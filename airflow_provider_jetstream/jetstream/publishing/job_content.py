"""What a stored message must have in common with a job to be that job.

A message id proves nothing: it is made of names and of the job, so others can compute it, and whoever may publish to a
subject of the queue can use it first. What counts is the subject, the id by which the job is known, the task that it
names, its other headers and its body. Headers of a trace say which try has sent a job, so they don't count; nor does
the time of a schedule, which a delay gives anew at each try. So a schedule, the message that is due and the job in the
queue have the same content.
"""

from __future__ import annotations

import json
import re
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.client.headers import first
from airflow_provider_jetstream.jetstream.contract import (
    AIRFLOW_TASK,
    DAG_ID,
    JOB_ID,
    MAP_INDEX,
    MSG_ID,
    RUN_ID,
    SCHEDULED_MSG_ID,
    TASK_ID,
    TRACE_PARENT,
    TRACE_STATE,
)
from airflow_provider_jetstream.jetstream.origin import Origin
from airflow_provider_jetstream.jetstream.publishing.job_identity import stated_job_id
from airflow_provider_jetstream.jetstream.publishing.schedules import SCHEDULE, TARGET, TIME_ZONE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob

CONTENT_BYTES: Final = 16

_INDEX: Final = re.compile(r"-?[0-9]{1,18}")
# The server adds it to a message that is due.
_SCHEDULER: Final = "Nats-Scheduler"
_TASK: Final = (DAG_ID, RUN_ID, TASK_ID, MAP_INDEX)
# The names in lower case of headers that aren't compared as they are.
_NOT_COMPARED: Final = frozenset(
    name.lower()
    for name in (
        *(TRACE_PARENT, TRACE_STATE, "baggage", MSG_ID, SCHEDULED_MSG_ID, JOB_ID, AIRFLOW_TASK, *_TASK),
        *(SCHEDULE, TARGET, TIME_ZONE, _SCHEDULER, "Nats-Schedule-Next"),
    )
)


def content_of_job(job: OutgoingJob, *, of_any_task: bool = False) -> bytes:
    """Return the digest of what tells a job from others.

    :param of_any_task: whether another task may have published it, as with an idempotency key
    """
    return _content(job.subject, tuple(job.headers.items()), job.body or b"", of_any_task=of_any_task)


def content_of_message(message: StoredMessage, *, of_any_task: bool = False) -> bytes:
    """Return for a stored message what :func:`content_of_job` returns for the job that it is."""
    return _content(message.subject, message.headers, message.data, of_any_task=of_any_task)


def is_same_job(job: OutgoingJob, message: StoredMessage, *, of_any_task: bool = False) -> bool:
    """Return whether a stored message is a job."""
    if job.job.delay is None and job.headers.get(SCHEDULE) != message.header(SCHEDULE):
        return False
    return content_of_job(job, of_any_task=of_any_task) == content_of_message(message, of_any_task=of_any_task)


def named_identity(headers: Iterable[tuple[str, str]], body: bytes) -> tuple[str | None, str | None]:
    """Return the id by which a job is known, and the key of the task that it names."""
    pairs = tuple(headers)
    return stated_job_id(pairs, body), _task_key(pairs)


def _content(subject: str, headers: tuple[tuple[str, str], ...], body: bytes, *, of_any_task: bool) -> bytes:
    job_id, task = named_identity(headers, body)
    # The server adds to a schedule that it replaces another one on its subject.
    added = ("Nats-Rollup", "sub") if first(headers, SCHEDULE) else None
    compared = (pair for pair in headers if pair[0].lower() not in _NOT_COMPARED and pair != added)
    # Readers leave white space around a value out.
    others = sorted([name, value.strip()] for name, value in compared)
    target = first(headers, TARGET) or (subject if first(headers, _SCHEDULER) else None)
    # Behind "due" and the name of the queue.
    own_subject = subject if target is None else target.split(".", 2)[-1]
    fields = [own_subject, job_id, None if of_any_task else task, others]
    return sha256(json.dumps(fields).encode() + b"\n" + body).digest()[:CONTENT_BYTES]


def _task_key(headers: tuple[tuple[str, str], ...]) -> str | None:
    if (key := first(headers, AIRFLOW_TASK)) is not None or (dag_id := first(headers, DAG_ID)) is None:
        return key
    run_id, task_id, index = (first(headers, name) or "" for name in _TASK[1:])
    return Origin(dag_id, run_id, task_id, int(index)).key if _INDEX.fullmatch(index) else None
