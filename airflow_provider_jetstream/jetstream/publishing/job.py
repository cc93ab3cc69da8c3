"""Jobs, and the subject, id and headers under which each is published."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.headers import is_servers
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any, subject_problem
from airflow_provider_jetstream.jetstream.contract import (
    AIRFLOW_TASK,
    EXECUTE_AT,
    JOB_ID,
    MSG_ID,
    schedule_once_subject,
    schedule_repeated_subject,
)
from airflow_provider_jetstream.jetstream.errors import JobError, JobNotSerializableError, JobTooLargeError
from airflow_provider_jetstream.jetstream.origin import Origin, short_digest
from airflow_provider_jetstream.jetstream.publishing.job_identity import MAX_JOB_ID, header_job_id, identity_headers
from airflow_provider_jetstream.jetstream.publishing.schedules import (
    ONCE_LEVEL,
    REPEATED_LEVEL,
    SCHEDULE,
    TARGET,
    schedule_headers,
)
from airflow_provider_jetstream.jetstream.queue.checks import NO_SCHEDULES_WITH_DISCARD_NEW
from airflow_provider_jetstream.jetstream.queue.message_size import Measured, made_headers
from airflow_provider_jetstream.jetstream.queue.partitions import (
    PLACEHOLDER,
    partition_of,
    partition_subject,
    placeholder_problem,
)
from airflow_provider_jetstream.jetstream.units import parse_time

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from datetime import timedelta
    from zoneinfo import ZoneInfo

    from airflow_provider_jetstream.jetstream.queue.message_size import SizeLimit
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
    """A job with its subject, id and headers.

    :param body: its encoded body; ``None`` where it can't be encoded
    :param key: its own id, or its index where it has none
    :param job_id: the id by which it is known
    :param message_id: the value of ``Nats-Msg-Id``
    :param api_level: the JetStream API level that the server must have
    """

    job: Job
    subject: str
    body: bytes | None
    key: str | int
    job_id: str
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
    by_key: bool = False,
    limit: SizeLimit | None = None,
) -> Iterator[OutgoingJob]:
    """Give every job its subject, id and headers.

    :param items: jobs, or just bodies
    :param subject: the subject of jobs that name none; with ``{partition}`` in place of a token where consumers divide
        the jobs
    :param origin: the publishing task, if there is one
    :param batch: unique for this call; part of the message ids of jobs without an origin
    :param queue: needed for partitions and schedules
    :param by_key: whether a stored record names the task, so that jobs hold only its key; otherwise they name the task
        themselves, as far as it fits
    :param limit: the largest job of the queue, where it is known
    :raises JobTooLargeError: a job, or its redriven copy, is larger than the queue's limit
    :raises JobError: a job has no subject, an invalid one, a header of the server's, or a partition or a schedule that
        the queue doesn't have
    """
    prepared = _prepare(items, subject, origin, batch, queue, limit, by_key=by_key)
    # Nothing of a list is sent unless all of it can be stored.
    return iter(list(prepared)) if limit and isinstance(items, list | tuple) else prepared


def _prepare(
    items: Iterable[object],
    subject: str | None,
    origin: Origin | None,
    batch: str,
    queue: WorkQueue | None,
    limit: SizeLimit | None,
    *,
    by_key: bool,
) -> Iterator[OutgoingJob]:
    for index, item in enumerate(items):
        job = Job.of(item)
        target = _checked_subject(index, job, job.subject or subject, queue)
        if job.advisory and (problem := subject_problem(job.advisory, wildcards=False)):
            raise JobError(
                f"job {index} can't be reported on {job.advisory!r}: {problem}; publish Job(body) where the body's"
                " advisory means something else"
            )
        if job.advisory and queue:
            _check_advisory(index, job.advisory, queue.advisory_subjects)
        check_headers(index, job.headers)
        _check_execute_at(index, job.headers, queue)
        body, own_id = _encoded(job), _text(job.id)
        if own_id and not _is_header_value(own_id):
            raise JobError(f"job {index} has the id {own_id!r}: expected text in one line, which a header can hold")
        if own_id and header_job_id([(JOB_ID, own_id)]) is None:
            raise JobError(
                f"job {index} has an id of {len(own_id.encode())} bytes: expected at most {MAX_JOB_ID}, and no U+FFFD,"
                " which stands for what isn't UTF-8; use a digest"
            )
        key = own_id or index
        message_id = origin.message_id(key) if origin else short_digest(batch, key)
        job_id = own_id or message_id
        is_scheduled = (job.at, job.delay, job.every, job.time_zone) != (None, None, None, None)
        headers = {name: value for name, value in job.headers.items() if name != JOB_ID} | identity_headers(
            job_id=job_id, message_id=message_id, advisory=job.advisory, body=body or b"", scheduled=is_scheduled
        )
        measured = Measured(len(body or b""), copied_id=None if JOB_ID in headers or own_id else message_id)
        if origin:
            headers = _with_origin(headers, origin, measured, by_key=by_key, limit=limit)
        outgoing = OutgoingJob(job, target, body, key, job_id, message_id, headers)
        if is_scheduled:
            outgoing = _scheduled(index, outgoing, queue)
        if limit and (problem := limit.problem(measured, outgoing.headers)):
            raise JobTooLargeError(f"job {index} {problem}")
        if limit and is_scheduled and (problem := limit.problem(measured, _made_headers(outgoing))):
            # The server would try to store it for ever.
            raise JobTooLargeError(f"job {index}, as the server makes it of its schedule, {problem}")
        yield outgoing


def _encoded(job: Job) -> bytes | None:
    try:
        return job.payload()
    except JobNotSerializableError:
        # Reported with the fate of all jobs.
        return None


def _with_origin(
    headers: dict[str, str], origin: Origin, job: Measured, *, by_key: bool, limit: SizeLimit | None
) -> dict[str, str]:
    if by_key:
        return headers | {AIRFLOW_TASK: origin.key}
    # Whoever reads a key looks for nothing else.
    named = {name: value for name, value in headers.items() if name != AIRFLOW_TASK} | origin.headers()
    return headers if limit and limit.problem(job, named) else named


def _checked_subject(index: int, job: Job, subject: str | None, queue: WorkQueue | None) -> str:
    if subject is None:
        raise JobError(f"job {index} has no subject: set it on the job, or a default for all")
    if PLACEHOLDER in subject or job.partition_key is not None:
        subject = _partitioned(index, job.partition_key, subject, queue)
    if problem := subject_problem(subject, wildcards=False):
        raise JobError(f"job {index} can't be published to {subject!r}: {problem}")
    return subject


def _check_advisory(index: int, advisory: str, declared: tuple[str, ...]) -> None:
    if declared and not covered_by_any(declared, advisory):
        raise JobError(
            f"job {index} names the advisory subject {advisory!r}, which is outside of the queue's advisory_subjects"
            f" ({', '.join(declared)}), so nothing would store what its worker reports there: choose a subject among"
            " them, or add this one to the declaration"
        )


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
    job_id, headers = job.job_id, dict(job.headers)
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
    scheduled = headers | schedule | {TARGET: job.subject}
    return replace(job, subject=subject, headers=scheduled, api_level=level)


def _made_headers(schedule: OutgoingJob) -> dict[str, str]:
    """Return the headers of the job that the server makes of a schedule."""
    own = {name: value for name, value in schedule.headers.items() if not is_servers(name)}
    return own | made_headers(schedule.subject, once=schedule.job.every is None)


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
        if not isinstance(value, str) or not _is_header_value(value):
            raise JobError(f"job {index}, header {name}: expected text without line breaks, found {value!r}")


def _is_header_value(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return not _LINE_BREAK.search(text)


def _check_execute_at(index: int, headers: Mapping[str, str], queue: WorkQueue | None) -> None:
    """Refuse a time that workers can't parse: such a job would be a dead letter."""
    if queue is None or not queue.execute_at_header or EXECUTE_AT not in headers:
        return
    try:
        parse_time(headers[EXECUTE_AT])
    except ValueError as error:
        raise JobError(f"job {index}, header {EXECUTE_AT}: {error}") from None


def _text(value: object) -> str | None:
    # White space around a header's value isn't sent.
    return None if value is None else str(value).strip() or None
