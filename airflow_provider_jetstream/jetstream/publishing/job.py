"""Jobs, and the subject, id and headers under which each is published."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.subjects import subject_problem
from airflow_provider_jetstream.jetstream.contract import (
    JOB_ADVISORY,
    JOB_ID,
    MSG_ID,
    schedule_once_subject,
    schedule_repeated_subject,
)
from airflow_provider_jetstream.jetstream.errors import JobError, JobNotSerializableError
from airflow_provider_jetstream.jetstream.origin import Origin, job_key_part
from airflow_provider_jetstream.jetstream.publishing.schedules import (
    ONCE_LEVEL,
    REPEATED_LEVEL,
    SCHEDULE,
    TARGET,
    schedule_headers,
)
from airflow_provider_jetstream.jetstream.queue.checks import NO_SCHEDULES_WITH_DISCARD_NEW
from airflow_provider_jetstream.jetstream.queue.partitions import (
    PLACEHOLDER,
    partition_of,
    partition_subject,
    placeholder_problem,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from datetime import timedelta
    from zoneinfo import ZoneInfo

    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_LINE_BREAK = re.compile(r"[\r\n]")


@dataclass(frozen=True, slots=True)
class Job:
    """One message of a work queue.

    :param body: bytes and text are published as they are, anything else as JSON; an object may hold ``id`` and
        ``advisory``
    :param subject: where it is published; the publisher's default where absent
    :param id: unique among the jobs of its publisher; a job that is published twice is stored once
    :param advisory: a subject on which its worker reports the completion, besides the queue's own events
    :param headers: further headers; names starting with ``Nats-`` belong to the server
    :param partition_key: jobs of the same key go to the same partition, whose number replaces ``{partition}`` in the
        subject
    :param at: when the server publishes the job, with a time zone
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
    at: datetime | None = None
    delay: str | timedelta | int | None = None
    every: str | timedelta | None = None
    time_zone: str | ZoneInfo | None = None

    @classmethod
    def of(cls, item: object) -> Job:
        """Return a job as it is, or make one of a body; a dict's ``id`` and ``advisory`` become the job's."""
        if isinstance(item, Job):
            return item
        if isinstance(item, dict):
            return cls(item, id=_text(item.get("id")), advisory=_text(item.get("advisory")))
        return cls(item)

    def payload(self) -> bytes:
        """Encode the body.

        :raises JobNotSerializableError: it is neither bytes nor text nor JSON
        """
        if isinstance(self.body, bytes):
            return self.body
        try:
            if isinstance(self.body, str):
                return self.body.encode()
            return json.dumps(self.body, allow_nan=False, separators=(",", ":")).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise JobNotSerializableError(
                f"expected a body of bytes, text or JSON values, found {type(self.body).__name__}: {error};"
                " convert it before publishing"
            ) from None


@dataclass(frozen=True, slots=True)
class OutgoingJob:
    """A job with its subject, id and headers; its body isn't encoded yet.

    :param message_id: the value of ``Nats-Msg-Id``
    :param api_level: the JetStream API level that the server must have
    """

    job: Job
    subject: str
    message_id: str
    headers: dict[str, str]
    api_level: int = 0

    @property
    def scheduled(self) -> bool:
        """Whether the server stores a schedule and publishes the job later."""
        return SCHEDULE in self.headers


def prepare_jobs(
    items: Iterable[object],
    *,
    subject: str | None,
    origin: Origin | None,
    batch: str,
    queue: WorkQueue | None = None,
) -> Iterator[OutgoingJob]:
    """Give every job its subject, id and headers.

    :param items: jobs, or just bodies
    :param subject: the subject of jobs that name none; with ``{partition}`` in place of a token where consumers divide
        the jobs
    :param origin: the publishing task, if there is one
    :param batch: unique for this call; part of the message ids of jobs without an origin
    :param queue: needed for partitions and schedules
    :raises JobError: a job has no subject, an invalid one, a header of the server's, or a partition or a schedule that
        the queue doesn't have
    """
    for index, item in enumerate(items):
        job = Job.of(item)
        target = _checked_subject(index, job, job.subject or subject, queue)
        if job.advisory and (problem := subject_problem(job.advisory, wildcards=False)):
            raise JobError(
                f"job {index} can't be reported on {job.advisory!r}: {problem}; publish Job(body) where the body's"
                " advisory means something else"
            )
        check_headers(index, job.headers)
        job_id = _text(job.id)
        key = job_id or index
        message_id = origin.message_id(key) if origin else f"{batch}/{job_key_part(key)}"
        headers = {**job.headers, **(origin.headers() if origin else {})}
        headers[MSG_ID] = message_id
        headers[JOB_ID] = job_id or message_id
        if job.advisory:
            headers[JOB_ADVISORY] = job.advisory
        outgoing = OutgoingJob(job, target, message_id, headers)
        is_scheduled = (job.at, job.delay, job.every, job.time_zone) != (None, None, None, None)
        yield _scheduled(index, outgoing, queue) if is_scheduled else outgoing


def _checked_subject(index: int, job: Job, subject: str | None, queue: WorkQueue | None) -> str:
    if subject is None:
        raise JobError(f"job {index} has no subject: set it on the job, or a default for all")
    if PLACEHOLDER in subject or job.partition_key is not None:
        subject = _partitioned(index, job.partition_key, subject, queue)
    if problem := subject_problem(subject, wildcards=False):
        raise JobError(f"job {index} can't be published to {subject!r}: {problem}")
    return subject


def _partitioned(index: int, key: str | None, subject: str, queue: WorkQueue | None) -> str:
    if problem := placeholder_problem(subject):
        raise JobError(f"job {index} has a partition_key, but its subject is {subject!r}: {problem}")
    if key is None:
        raise JobError(f"job {index} has no partition_key, which {subject!r} needs: set it on the job")
    if queue is None:
        raise JobError(f"job {index} has a partition_key: pass the queue too, which declares the number of partitions")
    if (count := queue.partition_count(subject)) is None:
        raise JobError(
            f"job {index} can't be published to {subject!r}: no consumer of {queue.name} has partitions on that"
            " subject; declare one with partitions and such a filter"
        )
    return partition_subject(subject, partition_of(key, count))


def _scheduled(index: int, job: OutgoingJob, queue: WorkQueue | None) -> OutgoingJob:
    at, delay, every = job.job.at, job.job.delay, job.job.every
    if sum(value is not None for value in (at, delay, every)) > 1:
        raise JobError(f"job {index} has several of at, delay and every: keep one")
    if queue is None:
        raise JobError(f"job {index} has a schedule: pass the queue too, which declares the subject of schedules")
    if not queue.schedules:
        raise JobError(
            f"job {index} has a schedule, and {queue.name} takes none: declare schedules: true"
            + (f'; impossible with discard "new": {NO_SCHEDULES_WITH_DISCARD_NEW}' if queue.discard == "new" else "")
        )
    job_id, headers = job.headers[JOB_ID], dict(job.headers)
    try:
        schedule = schedule_headers(at, delay, every, job.job.time_zone, now=datetime.now(UTC))
    except ValueError as error:
        raise JobError(f"job {index}: {error}") from None
    if every is None:
        subject, level = schedule_once_subject(queue.name, job_id, job.message_id), ONCE_LEVEL
    else:
        if job.job.id is None:
            raise JobError(
                f"job {index} has a repeating schedule: give it an id, by which it can be replaced or cancelled"
            )
        subject, level = schedule_repeated_subject(queue.name, job_id), REPEATED_LEVEL
        # Its subject identifies it. With a message id, the server would drop a changed schedule as a duplicate.
        del headers[MSG_ID]
    return OutgoingJob(job.job, subject, job.message_id, headers | schedule | {TARGET: job.subject}, level)


def check_headers(index: int | str, headers: Mapping[str, str]) -> None:
    """Refuse headers that can't be sent, or on which the server would act.

    :param index: the job's index or id, for the message
    :raises JobError: there is such a header
    """
    for name, value in headers.items():
        if name.lower().startswith("nats-"):
            raise JobError(f"job {index} sets {name}: headers starting with Nats- belong to the server")
        if not _HEADER_NAME.fullmatch(name):
            raise JobError(f"job {index} has a header {name!r}: expected a name of letters, digits and dashes")
        if not isinstance(value, str) or _LINE_BREAK.search(value):
            raise JobError(f"job {index}, header {name}: expected text without line breaks, found {value!r}")


def _text(value: object) -> str | None:
    return None if value is None else str(value)
