"""Jobs, and the subject, id and headers under which each is published."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.headers import is_servers
from airflow_provider_jetstream.jetstream.contract import (
    AIRFLOW_TASK,
    JOB_ID,
    MSG_ID,
    schedule_once_subject,
    schedule_repeated_subject,
)
from airflow_provider_jetstream.jetstream.errors import JobError, JobNotSerializableError, JobTooLargeError
from airflow_provider_jetstream.jetstream.field_names import checked_field_names
from airflow_provider_jetstream.jetstream.origin import Origin, ShortDigests
from airflow_provider_jetstream.jetstream.publishing.job_fields import field_problem
from airflow_provider_jetstream.jetstream.publishing.job_identity import body_field, identity_headers
from airflow_provider_jetstream.jetstream.publishing.job_keys import (
    CONTENTS,
    WITH_HEADERS,
    JobKeys,
    declared_content,
    given_id,
    text_or_none,
)
from airflow_provider_jetstream.jetstream.publishing.job_target import JobTargets
from airflow_provider_jetstream.jetstream.publishing.outgoing_checks import (
    check_advisory,
    check_execute_at,
    check_headers,
    check_id,
)
from airflow_provider_jetstream.jetstream.publishing.reading_thread import iterate
from airflow_provider_jetstream.jetstream.publishing.schedules import (
    ONCE_LEVEL,
    REPEATED_LEVEL,
    SCHEDULE,
    TARGET,
    schedule_headers,
)
from airflow_provider_jetstream.jetstream.queue.checks import NO_SCHEDULES_WITH_DISCARD_NEW
from airflow_provider_jetstream.jetstream.queue.message_size import Measured, made_headers

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import timedelta
    from zoneinfo import ZoneInfo

    from airflow_provider_jetstream.jetstream.publishing.job_keys import JobIdSource, JobKey
    from airflow_provider_jetstream.jetstream.queue.message_size import SizeLimit
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


@checked_field_names(JobError)
@dataclass(frozen=True, slots=True)
class Job:
    """One message of a work queue.

    :param body: bytes and text are published as they are, anything else as JSON
    :param subject: where it is published; the publisher's default where absent
    :param id: unique among the jobs of its task: a job that is published twice is stored once, and one with another
        body is refused. A job without an id is known by its subject, body, headers and schedule, and by the number of
        equal jobs before it
    :param advisory: a subject on which its worker reports the completion, besides the queue's own events
    :param headers: further headers; names starting with ``Nats-`` belong to the server
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
    :param key: what identifies it among the jobs of its task
    :param job_id: the id by which it is known
    :param message_id: the value of ``Nats-Msg-Id``
    :param api_level: the JetStream API level that the server must have
    """

    job: Job
    subject: str
    body: bytes | None
    key: JobKey
    job_id: str
    message_id: str
    headers: dict[str, str]
    api_level: int = 0

    @property
    def scheduled(self) -> bool:
        """Whether the server stores a schedule and publishes the job later."""
        return SCHEDULE in self.headers


def prepare_jobs(
    items: Iterable[object] | AsyncIterable[object],
    *,
    subject: str | None,
    origin: Origin | None,
    batch: str,
    queue: WorkQueue | None = None,
    by_key: bool = False,
    limit: SizeLimit | None = None,
    job_id: JobIdSource | None = None,
    check: Callable[[int, OutgoingJob], None] | None = None,
    captured: Sequence[str] = (),
    contents: int = CONTENTS,
) -> Iterator[OutgoingJob]:
    """Give every job its subject, id and headers.

    :param items: jobs, or just bodies; of a list, none is returned before all are checked
    :param subject: the subject of jobs that name none; with ``{partition}`` in place of a token where consumers divide
        the jobs
    :param origin: the publishing task, if there is one
    :param batch: unique for this call; part of the message ids of jobs without an origin
    :param queue: needed for partitions and schedules
    :param by_key: whether a stored record names the task, so that jobs hold only its key; otherwise they name the task
        themselves, as far as it fits
    :param limit: the largest job of the queue, where it is known
    :param job_id: where the ids of jobs are that have none of their own: a field of the body, or what returns the id
    :param check: called with each job and its position; refuses those that can't be published
    :param captured: the subjects of the queue's stream, where they are known
    :param contents: the number of what counts as the content of a job without an id
    :raises JobTooLargeError: a job, or its redriven copy, is larger than the queue's limit
    :raises JobError: a job has no subject, an invalid one, one that the queue doesn't capture, a header of the
        server's, a partition or a schedule that the queue doesn't have, or the id of another job
    """
    preparation = _Preparation(
        subject, origin, batch, queue, limit, job_id, check, captured, by_key=by_key, contents=contents
    )
    prepared = preparation.outgoing(iterate(items))
    # Nothing of a list is sent unless all of it can be stored.
    return whole(prepared) if isinstance(items, list | tuple) else prepared


def whole(jobs: Iterable[OutgoingJob]) -> Iterator[OutgoingJob]:
    """Yield jobs once all of them are prepared."""
    yield from list(jobs)


class _Preparation:
    def __init__(
        self,
        subject: str | None,
        origin: Origin | None,
        batch: str,
        queue: WorkQueue | None,
        limit: SizeLimit | None,
        job_id: JobIdSource | None,
        check: Callable[[int, OutgoingJob], None] | None,
        captured: Sequence[str],
        *,
        by_key: bool,
        contents: int,
    ) -> None:
        self._subject = subject
        self._origin = origin
        self._queue = queue
        self._limit = limit
        self._job_id = job_id
        self._check = check
        self._targets = JobTargets(subject, queue, captured)
        self._with_headers = contents >= WITH_HEADERS
        self._keys = JobKeys()
        self._message_ids = origin.message_ids() if origin else ShortDigests(batch)
        self._task_key = origin.key if origin and by_key else None
        self._advisory_subjects = queue.advisory_subjects if queue else ()

    def outgoing(self, items: Iterable[object]) -> Iterator[OutgoingJob]:
        for index, item in enumerate(items):
            outgoing = self._identified(index, item)
            if self._check:
                self._check(index, outgoing)
            yield outgoing

    def _key_of(self, index: int, job: Job, own_id: str | None, body: bytes | None) -> JobKey:
        declared: Sequence[object] = ()
        if own_id:
            check_id(index, own_id)
        elif self._with_headers and (job.headers or job.advisory or job.schedule):
            declared = declared_content(job.headers, job.advisory, job.schedule, body or b"")
        return self._keys.key_of(index, own_id, job.subject or self._subject or "", job.partition_key, body, declared)

    def _identified(self, index: int, item: object) -> OutgoingJob:
        job, queue, origin, limit = Job.of(item), self._queue, self._origin, self._limit
        target = self._targets.of(index, job.subject, job.partition_key)
        if job.advisory:
            check_advisory(index, job.advisory, self._advisory_subjects)
        if job.headers:
            check_headers(index, job.headers)
            check_execute_at(index, job.headers, queue)
        body, is_scheduled = _encoded(job), job.schedule is not None
        own_id = given_id(index, item, job.id, body, self._job_id, self._advisory_subjects)
        key = self._key_of(index, job, own_id, body)
        message_id = self._message_ids.of(*key.parts)
        job_id = own_id or body_field(body or b"", "id") or message_id
        headers = identity_headers(
            job_id=job_id, message_id=message_id, advisory=job.advisory, body=body or b"", scheduled=is_scheduled
        )
        if job.headers:
            headers = {name: value for name, value in job.headers.items() if name != JOB_ID} | headers
        copied_id = None if JOB_ID in headers or job_id != message_id else message_id
        measured = Measured(len(body or b""), copied_id=copied_id)
        if self._task_key:
            headers[AIRFLOW_TASK] = self._task_key
        elif origin:
            headers = _with_origin(headers, origin, measured, limit)
        outgoing = OutgoingJob(job, target, body, key, job_id, message_id, headers)
        if is_scheduled:
            outgoing = _scheduled(index, outgoing, queue)
        if limit and (problem := limit.problem(measured, outgoing.headers)):
            raise JobTooLargeError(f"job {index} {problem}")
        if limit and is_scheduled and (problem := limit.problem(measured, _made_headers(outgoing))):
            # The server would try to store it for ever.
            raise JobTooLargeError(f"job {index}, as the server makes it of its schedule, {problem}")
        return outgoing


def _encoded(job: Job) -> bytes | None:
    try:
        return job.payload()
    except JobNotSerializableError:
        # Reported with the fate of all jobs.
        return None


def _with_origin(headers: dict[str, str], origin: Origin, job: Measured, limit: SizeLimit | None) -> dict[str, str]:
    # Whoever reads a key looks for nothing else.
    named = {name: value for name, value in headers.items() if name != AIRFLOW_TASK} | origin.headers()
    return headers if limit and limit.problem(job, named) else named


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
    except (ValueError, OverflowError) as error:
        raise JobError(f"job {index}: {error}") from None
    if every is None:
        subject, level = schedule_once_subject(queue.name, job_id, job.message_id), ONCE_LEVEL
    else:
        if job.key.given_id is None:
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
