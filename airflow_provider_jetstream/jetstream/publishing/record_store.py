"""Stores the records of tasks: one for each task, until no message can name the task any more.

The server would remove a record after the ``max_age`` of the events stream, while the task's jobs, dead letters and
their copies may stay for longer. So records are stored with ``Nats-TTL: never``, and are removed here, after that time
and once nothing names the task: all jobs that it has published are stored before its closed record, but for redriven
copies, and a redrive stores the record again behind them.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently, sleep
from airflow_provider_jetstream.jetstream.client.headers import Headers
from airflow_provider_jetstream.jetstream.client.message_reader import last_message, next_message
from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info, subject_counts
from airflow_provider_jetstream.jetstream.contract import (
    copy_filter,
    parked_filter,
    publish_log_filter,
    publish_log_subject,
    schedule_filter,
)
from airflow_provider_jetstream.jetstream.errors import ApiError, NotFoundError, TransientError
from airflow_provider_jetstream.jetstream.publishing.publish_record import (
    PublishRecord,
    new_record,
    parse_publish_record,
)
from airflow_provider_jetstream.jetstream.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

log = logging.getLogger(__name__)

# The API level that knows Nats-TTL: an older server stores it as a header like any other.
TTL_LEVEL: Final = 1
_NO_TTL: Final = 10166
# A server answers with the second one while the cluster still replicates another record on the subject.
CONFLICTS: Final = frozenset({10071, 10164})
_ATTEMPTS = 5
# Multiplied by the number of failed attempts but one: a cluster may still replicate the other record.
_PAUSE = 0.1
# The clocks of the servers that lead two streams may differ; a record is removed well after nothing names it.
_MARGIN = timedelta(hours=1)
_EXAMINED = 64
_ALL_EXAMINED = 1_000


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record as it is stored.

    :param sequence: its sequence in the events stream
    """

    record: PublishRecord
    sequence: int


class RecordStore:
    """The records of a queue's tasks.

    :param queue: the work queue's name
    :param events: the name of the events stream, which stores the records
    """

    def __init__(self, connection: Connection, queue: str, events: str) -> None:
        self._connection = connection
        self._queue = queue
        self._events = events
        self._never_expires = connection.api_level >= TTL_LEVEL

    async def read(self, key: str) -> StoredRecord | None:
        """Read the record of a task.

        :param key: the task's key, one token
        """
        try:
            message = await last_message(self._connection, self._events, publish_log_subject(self._queue, key))
        except NotFoundError:
            return None
        record = parse_publish_record(message.data) if message else None
        return StoredRecord(record, message.sequence) if message and record else None

    async def store(self, key: str, record: PublishRecord, *, after: int) -> StoredRecord:
        """Store a record if nobody has stored another one meanwhile.

        :param after: the sequence of the record that it replaces; 0 where there is none
        :raises ApiError: somebody has, or the server refused
        """
        # Some other stream may capture the subject of a queue whose events stream is older than these records.
        headers = [("Nats-Expected-Stream", self._events), ("Nats-Expected-Last-Subject-Sequence", str(after))]
        body = record.model_dump_json(by_alias=True, exclude_none=True).encode()
        subject = publish_log_subject(self._queue, key)
        # Nothing names the record of an idempotency key; after the stream's max_age its jobs may be published again.
        if self._never_expires and record.idempotency_key is None:
            try:
                kept = Headers([*headers, ("Nats-TTL", "never")])
                return StoredRecord(record, (await store(self._connection, subject, body, kept)).sequence)
            except ApiError as error:
                if error.err_code != _NO_TTL:
                    raise
                self._never_expires = False
                log.warning(
                    "%s doesn't allow messages a time to live of their own, so after its max_age the tasks that"
                    " published jobs of %s aren't known any more: provision the queue again",
                    *(self._events, self._queue),
                )
        return StoredRecord(record, (await store(self._connection, subject, body, Headers(headers))).sequence)

    async def update(
        self,
        key: str,
        change: Callable[[PublishRecord | None], PublishRecord | None],
        known: StoredRecord | None = None,
    ) -> StoredRecord | None:
        """Replace a record by a changed one; again if somebody has replaced it meanwhile.

        :param change: returns the new record; ``None`` for no change
        :param known: the record as it was last seen
        :return: the record as it is stored now
        """
        for attempt in range(_ATTEMPTS):
            stored = known if known and not attempt else await self.read(key)
            if (record := change(stored.record if stored else None)) is None:
                return stored
            try:
                return await self.store(key, record, after=stored.sequence if stored else 0)
            except ApiError as error:
                if error.err_code not in CONFLICTS or attempt == _ATTEMPTS - 1:
                    raise
            await sleep(_PAUSE * attempt)
        return None

    async def remove_older(self, key: str) -> None:
        """Remove what the last record of a task has replaced."""
        request = {"filter": publish_log_subject(self._queue, key), "keep": 1}
        # Where the server refuses, the task is known all the same.
        with suppress(ApiError):
            await self._connection.api(f"STREAM.PURGE.{self._events}", request)


async def renew_records(
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
    records = RecordStore(connection, queue, events)

    async def renew(key: str) -> None:
        sequence, origin = copies[key]

        def extended(record: PublishRecord | None) -> PublishRecord | None:
            if record is None:
                if origin is None or origin.key != key:
                    return None
                info = {"created": created, "state": {"last_seq": sequence - 1}}
                return new_record(queue, info, origin).covering([sequence]).model_copy(update={"closed": True})
            return record.covering([sequence])

        if await records.update(key, extended):
            await records.remove_older(key)

    await map_concurrently(renew, copies)


async def maintain_records(connection: Connection, queue: WorkQueue) -> None:
    """Remove the records that nothing names any more, and warn where the server can't keep the others."""
    if queue.events and queue.events.max_age and connection.api_level < TTL_LEVEL:
        log.warning(
            "The server is older than 2.11, so %s forgets after %s which tasks published jobs of %s, and letters of"
            " that age have no DAG, run and task: upgrade it, or declare a longer max_age of the events",
            *(queue.events.name, format_duration(queue.events.max_age), queue.name),
        )
    with suppress(ApiError, TransientError):
        await remove_unneeded_records(connection, queue, at_most=_ALL_EXAMINED)


async def remove_unneeded_records(connection: Connection, queue: WorkQueue, *, at_most: int = _EXAMINED) -> int:
    """Remove records of tasks that no job, dead letter or copy names any more, and return their number.

    :param at_most: how many records are examined, the oldest first
    """
    if queue.events is None or not (max_age := _lifetime(queue.events.max_age)):
        return 0
    events = queue.events.name
    # Before the streams are looked at: what a closed record's task has published is stored by now.
    candidates = await _oldest_records(connection, events, queue.name, max_age, at_most)
    if not candidates:
        return 0
    oldest = await _oldest_job(connection, queue)
    letters = await _recorded_letters(connection, queue)
    schedules = await _has_schedules(connection, queue.name)
    removed = 0
    for message, record in candidates:
        if oldest is not None and message.stored_at >= oldest - _MARGIN:
            continue
        if letters is None or record.may_name_any(letters):
            continue
        if record.scheduled:
            if not schedules:
                await _end_schedules(connection, queue.name, events, record)
            continue
        try:
            await connection.api(f"STREAM.MSG.DELETE.{events}", {"seq": message.sequence, "no_erase": True})
        except ApiError:
            # Another task has removed it, or the stream allows no deletes.
            continue
        removed += 1
    return removed


def _lifetime(max_age: int | None) -> timedelta | None:
    """Return for how long a record is kept at least; ``None`` where for ever.

    :param max_age: that of the events stream, in nanoseconds: a task that is cleared within it continues its record
    """
    return max(_MARGIN, timedelta(microseconds=max_age / 1_000)) if max_age and max_age > 0 else None


async def _oldest_records(
    connection: Connection, events: str, queue: str, older_than: timedelta, at_most: int
) -> list[tuple[StoredMessage, PublishRecord]]:
    """Read the oldest records that name their task."""
    records: list[tuple[StoredMessage, PublishRecord]] = []
    start = 1
    for _ in range(at_most):
        message = await next_message(connection, events, start, publish_log_filter(queue))
        if message is None or datetime.now(UTC) - message.stored_at < older_than:
            break
        start = message.sequence + 1
        # Others are of earlier versions, which let them expire.
        if (record := parse_publish_record(message.data)) and record.origin:
            records.append((message, record))
    return records


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
                token = subject.rpartition(".")[2]
                if not token.isdecimal():
                    return None
                sequences.add(int(token))
    return sorted(sequences)


async def _has_schedules(connection: Connection, queue: str) -> bool:
    async for _ in subject_counts(connection, queue, schedule_filter(queue)):
        return True
    return False


async def _end_schedules(connection: Connection, queue: str, events: str, record: PublishRecord) -> None:
    """Store a record behind the last job that the server has made of the task's schedules."""
    if record.origin is None:
        return
    last = int((await stream_info(connection, queue))["state"]["last_seq"])

    def ended(stored: PublishRecord | None) -> PublishRecord | None:
        return stored.covering([last]).model_copy(update={"scheduled": False}) if stored else None

    with suppress(ApiError, TransientError):
        records = RecordStore(connection, queue, events)
        await records.update(record.origin.key, ended)
        await records.remove_older(record.origin.key)
