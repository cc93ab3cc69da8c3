"""A job, and the headers that tell where it came from."""

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
from airflow_provider_jetstream.jetstream.origin import Origin, _last_part
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
    at_partition,
    partition_count,
    partition_of,
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

    :param body: bytes or text as they are, anything else as JSON; an object may carry ``id`` and ``advisory``
    :param subject: where it is published; the publisher's default where absent
    :param id: unique among the jobs of its publisher; makes publishing it twice store it once
    :param advisory: a subject on which its worker reports the completion, besides the queue's own events
    :param headers: further headers; names starting with ``Nats-`` belong to the server
    :param partition_key: what jobs of one partition have in common; its partition takes the place of ``{partition}`` in
        the subject
    :param at: when the server makes the job of it, with a time zone
    :param delay: how long from publishing until then, such as ``"10m"``
    :param every: how often the server makes a job of it: a duration such as ``"30s"``, a cron expression of six fields,
        or ``@daily`` and the like. A later one of the same id takes its place
    :param time_zone: in which a cron expression is meant, such as ``"Europe/Vienna"``; UTC where absent
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
        """Take a job as people hand it over.

        :param item: a :class:`Job`, or just its body
        :return: the job, with ``id`` and ``advisory`` of a JSON object's body where it has them
        """
        if isinstance(item, Job):
            return item
        if isinstance(item, dict):
            return cls(item, id=_text(item.get("id")), advisory=_text(item.get("advisory")))
        return cls(item)

    def payload(self) -> bytes:
        """Encode the body.

        :return: what is published
        :raises JobNotSerializableError: if it is neither bytes nor text nor JSON
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
    """A job ready for the wire, except that its body may still turn out not to be serialisable.

    :param job: the job
    :param subject: where it goes
    :param message_id: the value of ``Nats-Msg-Id``
    :param headers: all its headers
    :param api_level: what the server must have for it
    """

    job: Job
    subject: str
    message_id: str
    headers: dict[str, str]
    api_level: int = 0

    @property
    def scheduled(self) -> bool:
        """Whether the server stores a schedule, from which it makes the job later."""
        return SCHEDULE in self.headers


def prepare(
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
    :param batch: unique for this call; makes the ids of jobs without any where there is no origin
    :param queue: the queue; needed for partitions and for jobs that are to be made later
    :return: the jobs in the same order
    :raises JobError: if a job has no subject or one that can't be published to, a header of the server's, or a
        partition or a time that the queue doesn't have
    """
    for index, item in enumerate(items):
        job = Job.of(item)
        target = _target(index, job, job.subject or subject, queue)
        if job.advisory and (problem := subject_problem(job.advisory, wildcards=False)):
            raise JobError(
                f"job {index} can't be reported on {job.advisory!r}: {problem}; hand over Job(body) where the body's"
                " advisory means something else"
            )
        check_headers(index, job.headers)
        job_id = _text(job.id)
        key = job_id or index
        message_id = origin.message_id(key) if origin else f"{batch}/{_last_part(key)}"
        headers = {**job.headers, **(origin.headers() if origin else {})}
        headers[MSG_ID] = message_id
        headers[JOB_ID] = job_id or message_id
        if job.advisory:
            headers[JOB_ADVISORY] = job.advisory
        outgoing = OutgoingJob(job, target, message_id, headers)
        later = (job.at, job.delay, job.every, job.time_zone) != (None, None, None, None)
        yield _scheduled(index, outgoing, queue) if later else outgoing


def _target(index: int, job: Job, subject: str | None, queue: WorkQueue | None) -> str:
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
        raise JobError(
            f"job {index} has a partition_key: hand over the queue too, which says how many partitions it has"
        )
    if (count := partition_count(queue.consumers, subject)) is None:
        raise JobError(
            f"job {index} can't be published to {subject!r}: no consumer of {queue.name} takes it in partitions;"
            " declare one with partitions and such a filter"
        )
    return at_partition(subject, partition_of(key, count))


def _scheduled(index: int, job: OutgoingJob, queue: WorkQueue | None) -> OutgoingJob:
    """Make a schedule of a job."""
    at, delay, every = job.job.at, job.job.delay, job.job.every
    if sum(value is not None for value in (at, delay, every)) > 1:
        raise JobError(f"job {index} has several of at, delay and every: keep one")
    if queue is None:
        raise JobError(f"job {index} is for later: hand over the queue too, which has a subject for schedules")
    if not queue.schedules:
        raise JobError(
            f"job {index} is for later, and {queue.name} has no schedules: declare schedules: true"
            + (f'; with discard "new" it can\'t: {NO_SCHEDULES_WITH_DISCARD_NEW}' if queue.discard == "new" else "")
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
                f"job {index} is made again and again: give it an id, by which it can be replaced or cancelled"
            )
        subject, level = schedule_repeated_subject(queue.name, job_id), REPEATED_LEVEL
        # Its subject tells it apart: what comes again takes its place, and an id would keep a change of it out.
        del headers[MSG_ID]
    return OutgoingJob(job.job, subject, job.message_id, headers | schedule | {TARGET: job.subject}, level)


def check_headers(index: int | str, headers: Mapping[str, str]) -> None:
    """Refuse headers that can't be sent, or that the server would act on.

    :param index: the job's place or id, for the message
    :param headers: the headers
    :raises JobError: if there is such a header
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
