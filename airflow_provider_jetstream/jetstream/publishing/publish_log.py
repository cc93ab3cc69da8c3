"""The publish log: one record per task of what it has published, stored in the events stream.

The server forgets message ids after the stream's ``duplicate_window``, which Airflow's default ``retry_delay`` exceeds.
A record is stored before a task publishes and again afterwards. It is closed once the task has nothing more to do:
then a task that is cleared publishes new jobs, while a retry of an open one publishes only what isn't stored.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from airflow_provider_jetstream.jetstream.advisories import Cancelled, Completion, parse_advisory
from airflow_provider_jetstream.jetstream.archive import ArchiveReader, job_sequence
from airflow_provider_jetstream.jetstream.client.headers import Headers
from airflow_provider_jetstream.jetstream.client.message_reader import last_message, read_range
from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import (
    JOB_ID,
    MSG_ID,
    archive_filter,
    completion_filter,
    publish_log_filter,
    publish_log_subject,
)
from airflow_provider_jetstream.jetstream.errors import ApiError, NotFoundError, TransientError
from airflow_provider_jetstream.jetstream.publishing.report import index_runs

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.publishing.report import PublishReport
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

# Many publishers at once scatter a task's jobs over more runs than a record should hold; a retry searches for them.
_MAX_RUNS = 5_000
# Counts an id as forgotten a little before the server forgets it.
_WINDOW_MARGIN = timedelta(seconds=2)

_WRONG_STREAM: Final = 10060
# A server answers with the second one while the cluster still replicates another record on the subject.
_RECORD_EXISTS: Final = frozenset({10071, 10164})


class PublishRecord(BaseModel):
    """What one task has published.

    :param stream: the work queue
    :param created: when its stream was created, in the server's own text
    :param round: how many times all of the task's jobs have ended before
    :param began_at: when the task began to publish in this round
    :param queue_from: the first sequence of the queue that the task's jobs may have
    :param cursor: where the ends of its jobs are found, as a dict; its JSON name is ``mark``
    :param runs: its jobs as index, sequence and count of each run; ``None`` where unknown
    :param published: how many jobs it stored, where known; stays when the record is closed
    :param closed: whether the task has nothing more to do
    """

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    type: Literal["io.airflow.jetstream.v1.published"] = "io.airflow.jetstream.v1.published"
    stream: str
    created: str
    round: int = 0
    began_at: datetime
    queue_from: int
    cursor: dict[str, Any] = Field(default_factory=dict, validation_alias="mark", serialization_alias="mark")
    runs: list[tuple[int, int, int]] | None = None
    published: int | None = None
    closed: bool = False


class PublishLog:
    """The publish log of one task.

    :param key: the task's key, one token, the same for all its tries
    """

    def __init__(self, connection: Connection, queue: WorkQueue, key: str) -> None:
        self._connection = connection
        self._queue = queue
        self._events = queue.events.name if queue.events else None
        self._subject = publish_log_subject(queue.name, key)
        self._record: PublishRecord | None = None

    async def begin(
        self, info: Mapping[str, Any], cursor: Mapping[str, Any] | None = None
    ) -> tuple[PublishRecord, StoredJobs] | None:
        """Store the record of a task that begins to publish, or read the one of an earlier try.

        :param info: the work queue's STREAM.INFO, read before anything is published
        :param cursor: where the ends of jobs that are published from now on will be found
        :return: the record and the jobs that are stored already; ``None`` where the events stream captures no such
            records
        """
        if self._events is None:
            return None
        record = PublishRecord(
            stream=self._queue.name,
            created=info["created"],
            began_at=datetime.now(UTC),
            queue_from=info["state"]["last_seq"] + 1,
            cursor=dict(cursor or {}),
        )
        try:
            # Most tasks are first tries: this condition saves them the request for an earlier record.
            await self._store(record, {"Nats-Expected-Last-Subject-Sequence": "0"})
        except ApiError as error:
            if error.err_code == _WRONG_STREAM:
                return None
            if error.err_code not in _RECORD_EXISTS:
                raise
        except TransientError:
            if await self._is_captured():
                raise
            return None
        else:
            return record, StoredJobs()
        earlier = await self._last_record()
        if earlier and earlier.created == record.created:
            if not earlier.closed:
                self._record = earlier
                return earlier, await self._stored_jobs(earlier, info)
            record = record.model_copy(update={"round": earlier.round + 1})
        await self._store(record)
        return record, StoredJobs()

    async def record_stored(self, report: PublishReport) -> None:
        """Record which jobs are stored; needs :meth:`begin` first."""
        if self._record:
            runs = index_runs(report.sequences)
            known = {"runs": runs if len(runs) <= _MAX_RUNS else None, "published": _job_count(report)}
            await self._store(self._record.model_copy(update=known))

    async def close(self, report: PublishReport | None = None) -> None:
        """Record that the task has nothing more to do.

        :param report: the fate of its jobs, where :meth:`record_stored` hasn't recorded it
        """
        record = self._record or await self._last_record()
        if record and not record.closed:
            published = _job_count(report) if report else record.published
            await self._store(record.model_copy(update={"closed": True, "runs": None, "published": published}))

    async def _last_record(self) -> PublishRecord | None:
        try:
            message = await last_message(self._connection, self._events, self._subject) if self._events else None
            return PublishRecord.model_validate_json(message.data) if message else None
        except (NotFoundError, ValidationError):
            return None

    async def _store(self, record: PublishRecord, conditions: Mapping[str, str] | None = None) -> None:
        # Some other stream may capture the subject of a queue whose events stream is older than publish logs.
        headers = Headers([("Nats-Expected-Stream", str(self._events)), *(conditions or {}).items()])
        body = record.model_dump_json(by_alias=True, exclude_none=True).encode()
        await store(self._connection, self._subject, body, headers)
        self._record = record

    async def _is_captured(self) -> bool:
        try:
            subjects = (await stream_info(self._connection, str(self._events)))["config"].get("subjects") or []
        except NotFoundError:
            return False
        return covered_by_any(subjects, publish_log_filter(self._queue.name))

    async def _stored_jobs(self, record: PublishRecord, info: Mapping[str, Any]) -> StoredJobs:
        if record.runs is not None:
            return StoredJobs(runs=tuple(record.runs))
        window = timedelta(microseconds=info["config"]["duplicate_window"] / 1_000)
        if datetime.now(UTC) - record.began_at < window - _WINDOW_MARGIN:
            # The server still knows the id of every job that this task may have stored.
            return StoredJobs()
        return await find_stored_jobs(
            self._connection,
            self._queue,
            created=datetime.fromisoformat(record.created),
            queue_from=record.queue_from,
            events_from=int(record.cursor.get("events_from", 1)),
        )


def _job_count(report: PublishReport) -> int:
    return sum(1 for sequence in report.sequences if sequence)


@dataclass(frozen=True, slots=True)
class StoredJobs:
    """The jobs of a task that are known to be stored.

    :param runs: index, sequence and count of each run of jobs, in the order of the indexes
    :param message_ids: stream sequences by ``Nats-Msg-Id``
    :param job_ids: stream sequences by the ``Job-Id`` of jobs that have ended
    """

    runs: tuple[tuple[int, int, int], ...] = ()
    message_ids: dict[str, int] = field(default_factory=dict)
    job_ids: dict[str, int] = field(default_factory=dict)

    def sequence_of(self, index: int, job: OutgoingJob) -> int | None:
        """Return the stream sequence of a job; ``None`` where it isn't known to be stored."""
        run = bisect_right(self.runs, index, key=lambda run: run[0]) - 1
        if run >= 0:
            first, start, count = self.runs[run]
            if index < first + count:
                return start + index - first
        if sequence := self.message_ids.get(job.message_id):
            return sequence
        # An id that the user set may be another publisher's too.
        return self.job_ids.get(job.message_id) if job.headers[JOB_ID] == job.message_id else None


async def find_stored_jobs(
    connection: Connection, queue: WorkQueue, *, created: datetime, queue_from: int, events_from: int
) -> StoredJobs:
    """Search the archive, the queue and the events stream for jobs, those of other publishers included.

    :param created: when the queue's stream was created; the archive may hold copies from an earlier one of its name
    :param queue_from: the first sequence of the queue that counts
    :param events_from: the first sequence of the events stream that counts
    """
    message_ids: dict[str, int] = {}
    job_ids: dict[str, int] = {}
    if queue.archive and (archive := await ArchiveReader.open(connection, queue, created)):
        start = await archive.first_copy_from(queue_from)
        async for copy in _read(connection, archive.stream, archive_filter(queue.name), start):
            sequence, message_id = job_sequence(copy), copy.header(MSG_ID)
            if message_id and sequence >= queue_from:
                message_ids[message_id] = sequence
    async for job in _read(connection, queue.name, ">", queue_from):
        if message_id := job.header(MSG_ID):
            message_ids[message_id] = job.sequence
    if queue.events:
        async for message in _read(connection, queue.events.name, completion_filter(queue.name), events_from):
            event = parse_advisory(message.data)
            if isinstance(event, Completion | Cancelled) and event.job_id and event.stream_seq >= queue_from:
                job_ids[event.job_id] = event.stream_seq
    return StoredJobs(message_ids=message_ids, job_ids=job_ids)


async def _read(connection: Connection, stream: str, subject: str, start: int) -> AsyncGenerator[StoredMessage, None]:
    try:
        async for message in read_range(connection, stream, subject, start):
            yield message
    except NotFoundError:
        # A stream that doesn't exist holds none of the task's jobs.
        return
