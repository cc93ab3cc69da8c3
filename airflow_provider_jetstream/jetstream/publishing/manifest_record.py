"""The record of what one task has published, as the events stream stores it, for as long as something names the task.

By the record's key, the task's jobs and dead letters name the task. The server would remove a record after the
``max_age`` of the events stream, while jobs, dead letters and their copies may stay for longer. So records are stored
with ``Nats-TTL: never``, and removed here once no message can name them any more: all jobs that a task has published
are stored before its closed record, but for redriven copies, and a redrive stores the record again behind them. So a
closed record isn't needed once it is older than the oldest job, and no dead letter queue has a copy of one of its jobs.
Times are the server's: a machine whose clock is off removes nothing too early.

Others than tasks may be allowed to publish there, so a record counts only where its names give the key.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from random import randint
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias
from uuid import uuid4

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently, sleep
from airflow_provider_jetstream.jetstream.client.headers import Headers
from airflow_provider_jetstream.jetstream.client.publish_ack import WRONG_LAST_SEQUENCE, store
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info, subject_counts
from airflow_provider_jetstream.jetstream.client.streams import last_with_position, next_message
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import copy_filter, manifest_filter, manifest_subject, parked_filter
from airflow_provider_jetstream.jetstream.documents import DocumentParts
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    DeadlineError,
    NotFoundError,
    TransientError,
    UnreachableError,
)
from airflow_provider_jetstream.jetstream.origin import Origin, TaskTry, is_task_key
from airflow_provider_jetstream.jetstream.publishing.schedules import find_schedules
from airflow_provider_jetstream.jetstream.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.publishing.report import PublishReport
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

log = logging.getLogger(__name__)

# The API level that knows Nats-TTL: an older server stores it as a header like any other.
TTL_LEVEL: Final = 1
_NO_TTL: Final = 10166
_WRONG_STREAM: Final = 10060
_ATTEMPTS = 5
# Multiplied by the number of failed attempts but one: a cluster may still replicate the other record.
_PAUSE = 0.1
# How long a change of the record waits for a connection that is being restored.
_AWAY_SECONDS = 10.0
# The one of the beginning and the one of the end are left: each task spares the request that would remove the first.
_LEFT: Final = 2
# The clocks of the servers that lead two streams may differ; a record is removed well after nothing names it.
_MARGIN = timedelta(hours=1)
_EXAMINED = 64
_ALL_EXAMINED = 1_000
_SEQUENCE = re.compile(r"[0-9]{1,20}")

_Count: TypeAlias = Annotated[int, Field(ge=0, lt=2**64)]


class ManifestRecord(BaseModel):
    """What one task has published; by its key, the task's jobs and dead letters name it.

    :param stream: the work queue
    :param created: when its stream was created, in the server's own text
    :param dag_id: the task's DAG; empty where a program publishes for its idempotency key
    :param run_id: the DAG run
    :param task_id: the task
    :param map_index: its index in a mapped task, ``-1`` otherwise
    :param round: how many times all of the task's jobs have ended before
    :param began_at: when the task began to publish in this round
    :param queue_from: the first sequence of the queue that the task's jobs may have
    :param first_job: the lowest sequence of the task's jobs in all rounds
    :param last_job: the highest one, redriven copies included; ``None`` where unknown
    :param scheduled: whether the server may still make jobs of the task's schedules
    :param cursor: where the ends of its jobs are found, as a dict; its JSON name is ``mark``
    :param runs: its jobs as index, sequence and count of each run; ``None`` where unknown
    :param idempotency_key: the key under which all runs of the task publish the same jobs; this record is theirs
    :param operation: the call of the task that published them, where it has several
    :param rows: the last of its jobs in base64
    :param parts: the references to the parts of the document that has the jobs before those
    :param unrecorded_from: the first sequence of the queue that may have a job which isn't in the manifest; ``None``
        where all of them are
    :param begun_by: the try that began last; only this one knows when all of its jobs are in the manifest
    :param published: how many jobs it stored, where known; stays when the record is closed
    :param max_tries: Airflow's number of the task's tries when it began, which a clear raises
    :param attempt: what Airflow told the try that began last
    :param run: what stands for the run in the message ids besides its name
    :param is_further_run: whether another run of the same name has the manifest of that name
    :param further_runs: what :attr:`run` is in the manifests of other runs of the same name, the latest last
    :param salts: what the message ids of jobs are made of besides, whose own ids somebody else had taken, the latest
        last
    :param over: whether waiting is over for good although jobs may still run
    :param closed: whether the task has nothing more to do
    """

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    type: Literal["io.airflow.jetstream.v1.published"] = "io.airflow.jetstream.v1.published"
    stream: str
    created: str
    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1
    round: _Count = 0
    began_at: AwareDatetime
    queue_from: _Count
    first_job: _Count
    last_job: _Count | None = None
    scheduled: bool = False
    cursor: dict[str, Any] = Field(default_factory=dict, validation_alias="mark", serialization_alias="mark")
    runs: list[tuple[_Count, _Count, _Count]] | None = None
    idempotency_key: str | None = None
    operation: str | None = None
    rows: str
    parts: DocumentParts = Field(default_factory=list)
    unrecorded_from: _Count | None = None
    begun_by: str = ""
    published: _Count | None = None
    max_tries: int | None = None
    attempt: TaskTry | None = None
    run: str | None = None
    is_further_run: bool = False
    further_runs: list[str] = Field(default_factory=list)
    salts: list[str] = Field(default_factory=list)
    over: bool = False
    closed: bool = False

    @classmethod
    def new(
        cls, queue: str, info: Mapping[str, Any], origin: Origin, cursor: Mapping[str, Any] | None = None
    ) -> ManifestRecord:
        """Return the record of a task that begins to publish.

        :param info: the queue's STREAM.INFO, read before anything is published
        :param cursor: where the ends of the task's jobs will be found
        """
        first = info["state"]["last_seq"] + 1
        return cls(
            stream=queue,
            created=info["created"],
            dag_id=origin.dag_id,
            run_id=origin.run_id,
            task_id=origin.task_id,
            map_index=origin.map_index,
            began_at=datetime.now(UTC),
            queue_from=first,
            first_job=first,
            last_job=first - 1,
            cursor=dict(cursor or {}),
            idempotency_key=origin.idempotency_key,
            operation=origin.operation,
            rows="",
            unrecorded_from=first,
            begun_by=uuid4().hex[:8],
            max_tries=origin.max_tries,
            attempt=origin.attempt,
            run=origin.run_mark,
            is_further_run=origin.is_further_run,
        )

    @property
    def origin(self) -> Origin:
        """The task."""
        return Origin(self.dag_id, self.run_id, self.task_id, self.map_index)

    @property
    def manifest_origin(self) -> Origin:
        """The task with what its manifest's key is made of besides."""
        return replace(
            self.origin,
            idempotency_key=self.idempotency_key,
            operation=self.operation,
            run=self.run,
            is_further_run=self.is_further_run,
        )

    @property
    def shares_task_key(self) -> bool:
        """Whether jobs of other manifests have the key of its task, too."""
        return self.operation is not None or self.is_further_run or bool(self.further_runs)

    def is_about(self, queue: str, key: str) -> bool:
        """Return whether it may be the record under a task's key."""
        return self.stream == queue and self.manifest_origin.manifest_key == key

    def position(self, name: str) -> int | None:
        """Return a position of its cursor, such as ``events_from``; ``None`` where it has none."""
        value = self.cursor.get(name)
        return value if isinstance(value, int) and value > 0 else None

    def may_name_any(self, sequences: Sequence[int]) -> bool:
        """Return whether one of the jobs of these sequences, in ascending order, may be the task's."""
        position = bisect_left(sequences, self.first_job)
        last = self.last_job if self.closed else None
        return position < len(sequences) and (last is None or sequences[position] <= last)

    def covering(self, sequences: Sequence[int]) -> ManifestRecord:
        """Return the record with more jobs; zeros are left out."""
        lowest = min(filter(None, sequences), default=None)
        if lowest is None:
            return self
        last = None if self.last_job is None else max(self.last_job, *sequences)
        return self.model_copy(update={"first_job": min(self.first_job, lowest), "last_job": last})

    def with_published(self, report: PublishReport) -> ManifestRecord:
        """Return the record with the jobs that a call has published."""
        covering = self.covering(report.queue_sequences())
        return covering.model_copy(update={"scheduled": True}) if report.scheduled else covering

    def resumed_by(self, record: ManifestRecord) -> ManifestRecord | None:
        """Return the record for a try that goes on with its jobs; ``None`` where it can stay as it is.

        :param record: the one that a first try would store
        """
        changed: dict[str, Any] = {"closed": False, "over": False}
        changed |= {"max_tries": record.max_tries, "begun_by": record.begun_by}
        if record.attempt:
            changed["attempt"] = record.attempt
        if self.unrecorded_from is None:
            changed["unrecorded_from"] = record.queue_from
        resumed = self.model_copy(update=changed)
        return None if resumed == self else resumed

    def followed_by(self, record: ManifestRecord, *, number: int) -> ManifestRecord:
        """Return a new record as the one after this one, whose jobs it covers too.

        :param number: the number of its round, where the queue is still the same
        """
        same_stream = self.created == record.created
        # Sequences of an earlier stream of this name don't bound those of this one.
        last = record.last_job if same_stream and self.last_job is not None else None
        following = {
            "first_job": min(self.first_job, record.queue_from),
            "last_job": last,
            "scheduled": self.scheduled,
            "round": number if same_stream else 0,
        }
        same_runs = {"run": self.run, "further_runs": self.further_runs} if same_stream else {}
        return record.model_copy(update=following | same_runs)


def parse_manifest_record(data: bytes) -> ManifestRecord | None:
    """Parse a stored record; ``None`` where it is none."""
    try:
        return ManifestRecord.model_validate_json(data)
    except ValidationError:
        return None


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record as it is stored, with its sequence in the events stream."""

    record: ManifestRecord
    sequence: int


class TaskRecord:
    """The record under one key: how it is read, and changed if nobody else has changed it meanwhile.

    :param queue: the work queue's name
    :param events: the name of the events stream, which stores it
    :ivar stored: as it was last seen
    """

    def __init__(self, connection: Connection, queue: str, events: str, key: str) -> None:
        self.key = key
        self.stored: StoredRecord | None = None
        self._connection = connection
        self._queue = queue
        self._events = events
        self._subject = manifest_subject(queue, key)
        self._never_expires = connection.api_level >= TTL_LEVEL
        # How many records the subject may have: as many as this has stored, where it has stored the first.
        self._count = _LEFT

    @property
    def position(self) -> int:
        """The sequence in the events stream of what was stored last; 1 where nothing was."""
        return self.stored.sequence if self.stored else 1

    async def read(self) -> StoredRecord | None:
        """Read the record."""
        record, sequence = await self._last()
        return StoredRecord(record, sequence) if record else None

    async def _last(self) -> tuple[ManifestRecord | None, int]:
        """Return the record, if there is one, and the sequence of the subject's last message."""
        try:
            message, position = await last_with_position(self._connection, self._events, self._subject)
        except NotFoundError:
            return None, 0
        record = parse_manifest_record(message.data) if message else None
        return record if record and record.is_about(self._queue, self.key) else None, position

    async def begin(self, record: ManifestRecord) -> bool | None:
        """Store a record if there is none, and return true; ``None`` where no events stream captures such records.

        Most tasks are first tries: the condition saves them the request for an earlier record.

        :raises ApiError: it couldn't be stored for another reason than that there is one
        :raises TransientError: it isn't known whether it is stored
        """
        try:
            await self._store(record, after=0)
        except ApiError as error:
            if error.err_code in WRONG_LAST_SEQUENCE:
                return False
            if error.err_code == _WRONG_STREAM:
                return None
            raise
        except TransientError:
            if await self._is_captured():
                raise
            return None
        self._count = 1
        return True

    async def _is_captured(self) -> bool:
        try:
            subjects = (await stream_info(self._connection, self._events))["config"].get("subjects") or []
        except NotFoundError:
            return False
        return covered_by_any(subjects, manifest_filter(self._queue))

    async def update(self, change: Callable[[ManifestRecord | None], ManifestRecord | None]) -> StoredRecord | None:
        """Replace the record by a changed one; again if somebody has replaced it meanwhile.

        :param change: returns the new record; ``None`` for no change
        :return: the record as it is stored now
        """
        for attempt in range(_ATTEMPTS):
            seen, reconnects = None if attempt else self.stored, self._connection.reconnects
            record, after = (seen.record, seen.sequence) if seen else await self._last()
            if (changed := change(record)) is None:
                self.stored = StoredRecord(record, after) if record else None
                break
            try:
                await self._store(changed, after=after)
                break
            except ApiError as error:
                if error.err_code not in WRONG_LAST_SEQUENCE or attempt == _ATTEMPTS - 1:
                    raise
            except (UnreachableError, DeadlineError):
                # A connection that was lost took the record or its answer with it. What is stored already isn't stored
                # again: the condition refuses it, and it is read.
                is_back = await self._connection.wait_until_connected(_AWAY_SECONDS)
                if attempt == _ATTEMPTS - 1 or not is_back or self._connection.reconnects == reconnects:
                    raise
            await sleep(_PAUSE * attempt)
        return self.stored

    async def _store(self, record: ManifestRecord, *, after: int) -> None:
        """Store a record if the subject's last message is still that of a sequence."""
        # Some other stream may capture the subject of a queue whose events stream is older than these records.
        headers = [("Nats-Expected-Stream", self._events), ("Nats-Expected-Last-Subject-Sequence", str(after))]
        body = record.model_dump_json(by_alias=True, exclude_none=True).encode()
        # No job names the record of an idempotency key, of one of several calls or of a further run; after the stream's
        # max_age its jobs may be published again. Without names, nothing would ever remove it.
        kept = [("Nats-TTL", "never")] if self._never_expires and record.manifest_origin.is_key_of_manifest else []
        try:
            ack = await store(self._connection, self._subject, body, Headers([*headers, *kept]))
        except ApiError as error:
            if error.err_code != _NO_TTL:
                raise
            self._never_expires = False
            log.warning(
                "%s doesn't allow messages a time to live of their own, so after its max_age the tasks that published"
                " jobs of %s aren't known any more: provision the queue again, with nats-server 2.12 or later where the"
                " stream exists",
                *(self._events, self._queue),
            )
            ack = await store(self._connection, self._subject, body, Headers(headers))
        self.stored = StoredRecord(record, ack.sequence)
        self._count += 1

    async def remove_older(self) -> None:
        """Remove what the record has replaced; the one of the beginning is left until the record is removed."""
        if self.stored is None or self._count <= _LEFT:
            return
        # Not all but the last: the subject's last message may be somebody else's.
        request = {"filter": self._subject, "seq": self.stored.sequence}
        # Where the server refuses, the task is known all the same.
        with suppress(ApiError, TransientError):
            await self._connection.api(f"STREAM.PURGE.{self._events}", request)


async def renew_manifests(
    connection: Connection,
    queue: str,
    events: str,
    created: str,
    copies: Mapping[str, tuple[int, Origin | None]],
) -> None:
    """Store the records of tasks again, behind the redriven copies of their jobs.

    :param created: when the queue's stream was created, in the server's own text
    :param copies: by the tasks' keys, the highest sequence of a copy, and the task where it is known otherwise
    """

    async def renew(key: str) -> None:
        sequence, origin = copies[key]
        task = TaskRecord(connection, queue, events, key)

        def extended(record: ManifestRecord | None) -> ManifestRecord | None:
            if record:
                return record.covering([sequence])
            if origin is None or origin.key != key:
                return None
            info = {"created": created, "state": {"last_seq": sequence - 1}}
            return ManifestRecord.new(queue, info, origin).covering([sequence]).model_copy(update={"closed": True})

        try:
            await task.update(extended)
            await task.remove_older()
        except (ApiError, TransientError) as error:
            log.warning("The task that published redriven jobs of %s may not be known for long: %s", queue, error)

    # Publishers write what they like into the header.
    await map_concurrently(renew, filter(is_task_key, copies))


async def maintain_manifests(connection: Connection, queue: WorkQueue) -> None:
    """Remove the records that nothing names any more, and warn where the server can't keep the others."""
    if queue.events and queue.events.max_age and connection.api_level < TTL_LEVEL:
        log.warning(
            "The server is older than 2.11, so %s forgets after %s which tasks published jobs of %s, and letters of"
            " that age have no DAG, run and task: upgrade it, or declare a longer max_age of the events",
            *(queue.events.name, format_duration(queue.events.max_age), queue.name),
        )
    with suppress(ApiError, TransientError):
        await remove_unneeded_manifests(connection, queue, at_most=_ALL_EXAMINED)


async def remove_unneeded_manifests(connection: Connection, queue: WorkQueue, *, at_most: int = _EXAMINED) -> int:
    """Remove records of tasks that no job, dead letter or copy names any more, and return their number.

    :param at_most: how many records are examined, the oldest first; then as many others where all of these are needed
    """
    if queue.events is None or not queue.events.max_age or queue.events.max_age < 0:
        return 0
    events = queue.events.name
    # A task that is cleared within it continues its record.
    max_age = max(_MARGIN, timedelta(microseconds=queue.events.max_age / 1_000))
    # Before the other streams are looked at: what a closed record's task has published is stored by now.
    try:
        info = await stream_info(connection, events)
    except NotFoundError:
        return 0
    old = datetime.fromisoformat(info["ts"]) - max_age
    candidates, rest = await _old_records(connection, events, queue.name, old, 1, at_most)
    removed = await _remove_among(connection, queue, events, candidates, max_age)
    last = int(info["state"]["last_seq"])
    if removed or rest is None or rest > last:
        return removed
    # Parked letters may need the oldest records for years.
    candidates, _ = await _old_records(connection, events, queue.name, old, randint(rest, last), at_most)  # noqa: S311
    return await _remove_among(connection, queue, events, candidates, max_age)


async def _remove_among(
    connection: Connection,
    queue: WorkQueue,
    events: str,
    candidates: Sequence[tuple[StoredMessage, ManifestRecord]],
    max_age: timedelta,
) -> int:
    oldest = await _oldest_job(connection, queue) if candidates else None

    def is_older(message: StoredMessage, record: ManifestRecord) -> bool:
        # The task of an open record was killed, or publishes still: for no longer than its record would have stayed.
        last_job_at = message.stored_at if record.closed else message.stored_at + max_age
        return oldest is None or last_job_at < oldest - _MARGIN

    candidates = [candidate for candidate in candidates if is_older(*candidate)]
    if not candidates or (letters := await _recorded_letters(connection, queue)) is None:
        return 0
    schedules = await find_schedules(connection, queue.name)
    has_schedules = schedules is not None and (await stream_info(connection, schedules))["state"]["messages"] > 0
    removed = 0
    for message, record in candidates:
        if record.may_name_any(letters):
            continue
        if record.scheduled:
            if not has_schedules:
                await _end_schedules(connection, queue.name, events, message, record)
            continue
        try:
            # With those that it has replaced.
            request = {"filter": message.subject, "seq": message.sequence + 1}
            answer = await connection.api(f"STREAM.PURGE.{events}", request)
        except ApiError:
            # The stream allows no purges.
            continue
        # Another task may have removed it.
        removed += bool(answer["purged"])
    return removed


async def _old_records(
    connection: Connection, events: str, queue: str, old: datetime, start: int, at_most: int
) -> tuple[list[tuple[StoredMessage, ManifestRecord]], int | None]:
    """Read records that name their task, of each task the last one, as far as they were stored before a time.

    :return: the records, and where to read on; ``None`` where there are no others
    """
    records: dict[str, tuple[StoredMessage, ManifestRecord]] = {}
    for _ in range(at_most):
        message = await next_message(connection, events, start, manifest_filter(queue))
        if message is None or message.stored_at > old:
            return list(records.values()), None
        start = message.sequence + 1
        if record := parse_manifest_record(message.data):
            records[message.subject] = message, record
    return list(records.values()), start


async def _oldest_job(connection: Connection, queue: WorkQueue) -> datetime | None:
    """Return when the oldest job of queue and archive was stored; ``None`` where they are empty."""
    times: list[datetime] = []
    for stream in (queue.name, *((queue.archive.name,) if queue.archive else ())):
        with suppress(NotFoundError):
            state = (await stream_info(connection, stream))["state"]
            if state["messages"]:
                times.append(datetime.fromisoformat(state["first_ts"]))
    return min(times, default=None)


async def _recorded_letters(connection: Connection, queue: WorkQueue) -> list[int] | None:
    """Return the sequences of the jobs that the dead letter queue has copies of; ``None`` where a copy names none."""
    if queue.dead_letters is None:
        return []
    sequences: set[int] = set()
    for filter_ in (copy_filter(queue.name), parked_filter(queue.name)):
        with suppress(NotFoundError):
            async for subject, _ in subject_counts(connection, queue.dead_letters.name, filter_):
                if not _SEQUENCE.fullmatch(token := subject.rpartition(".")[2]):
                    return None
                sequences.add(int(token))
    return sorted(sequences)


async def _end_schedules(
    connection: Connection, queue: str, events: str, message: StoredMessage, record: ManifestRecord
) -> None:
    """Store a record behind the last job that the server has made of the task's schedules.

    Nothing is stored where the task has published more meanwhile.
    """
    last = int((await stream_info(connection, queue))["state"]["last_seq"])
    ended = record.covering([last]).model_copy(update={"scheduled": False})
    task = TaskRecord(connection, queue, events, message.subject.rpartition(".")[2])
    task.stored = StoredRecord(record, message.sequence)
    with suppress(ApiError, TransientError):
        await task.update(lambda stored: ended if stored is record else None)
        await task.remove_older()
