"""Removes the records of tasks that no message can name any more.

All jobs that a task has published are stored before its closed record, but for redriven copies, and a redrive stores
the record again behind them. So a closed record isn't needed once it is older than the oldest job, and no dead letter
queue has a copy of one of its jobs. Times are the server's: a machine whose clock is off removes nothing too early.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from datetime import datetime, timedelta
from random import randint
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.message_reader import next_message
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info, subject_counts
from airflow_provider_jetstream.jetstream.contract import (
    copy_filter,
    manifest_filter,
    parked_filter,
)
from airflow_provider_jetstream.jetstream.errors import ApiError, NotFoundError, TransientError
from airflow_provider_jetstream.jetstream.publishing.manifest_head import ManifestHead, parse_manifest_head
from airflow_provider_jetstream.jetstream.publishing.manifest_store import TTL_LEVEL, ManifestStore
from airflow_provider_jetstream.jetstream.publishing.schedules import find_schedules
from airflow_provider_jetstream.jetstream.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

log = logging.getLogger(__name__)

# The clocks of the servers that lead two streams may differ; a record is removed well after nothing names it.
_MARGIN = timedelta(hours=1)
_EXAMINED = 64
_ALL_EXAMINED = 1_000
_SEQUENCE = re.compile(r"[0-9]{1,20}")


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
    if queue.events is None or not (max_age := _lifetime(queue.events.max_age)):
        return 0
    events = queue.events.name
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
    candidates: Sequence[tuple[StoredMessage, ManifestHead]],
    max_age: timedelta,
) -> int:
    oldest = await _oldest_job(connection, queue) if candidates else None
    candidates = [
        (message, record)
        for message, record in candidates
        if oldest is None or _last_job_at(message, record, max_age) < oldest - _MARGIN
    ]
    if not candidates or (letters := await _recorded_letters(connection, queue)) is None:
        return 0
    schedules = await _has_schedules(connection, queue.name)
    removed = 0
    for message, record in candidates:
        if record.may_name_any(letters):
            continue
        if record.scheduled:
            if not schedules:
                await _end_schedules(connection, queue.name, events, message, record)
            continue
        try:
            await connection.api(f"STREAM.MSG.DELETE.{events}", {"seq": message.sequence, "no_erase": True})
        except ApiError:
            # Another task has removed it, or the stream allows no deletes.
            continue
        removed += 1
    return removed


def _last_job_at(message: StoredMessage, record: ManifestHead, max_age: timedelta) -> datetime:
    """Return when the last job was stored that a record names.

    The task of an open record was killed, or publishes still: for no longer than its record would have stayed.
    """
    return message.stored_at if record.closed else message.stored_at + max_age


def _lifetime(max_age: int | None) -> timedelta | None:
    """Return for how long a record is kept at least; ``None`` where for ever.

    :param max_age: that of the events stream, in nanoseconds: a task that is cleared within it continues its record
    """
    return max(_MARGIN, timedelta(microseconds=max_age / 1_000)) if max_age and max_age > 0 else None


async def _old_records(
    connection: Connection, events: str, queue: str, old: datetime, start: int, at_most: int
) -> tuple[list[tuple[StoredMessage, ManifestHead]], int | None]:
    """Read records that name their task, in order, as far as they were stored before a time.

    :return: the records, and where to read on; ``None`` where there are no others
    """
    records: list[tuple[StoredMessage, ManifestHead]] = []
    for _ in range(at_most):
        message = await next_message(connection, events, start, manifest_filter(queue))
        if message is None or message.stored_at > old:
            return records, None
        start = message.sequence + 1
        # Others are of earlier versions, which let them expire.
        if (record := parse_manifest_head(message.data)) and record.origin:
            records.append((message, record))
    return records, start


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


async def _has_schedules(connection: Connection, queue: str) -> bool:
    stream = await find_schedules(connection, queue)
    return stream is not None and (await stream_info(connection, stream))["state"]["messages"] > 0


async def _end_schedules(
    connection: Connection, queue: str, events: str, message: StoredMessage, record: ManifestHead
) -> None:
    """Store a record behind the last job that the server has made of the task's schedules.

    Nothing is stored where the task has published more meanwhile.
    """
    last = int((await stream_info(connection, queue))["state"]["last_seq"])
    ended = record.covering([last]).model_copy(update={"scheduled": False})
    key = message.subject.rpartition(".")[2]
    with suppress(ApiError, TransientError):
        records = ManifestStore(connection, queue, events)
        stored = await records.store(key, ended, after=message.sequence)
        await records.remove_older(key, stored.sequence)
