"""Whether the consumer whose workers say that a job ended may have had the job.

A worker may name the job of any consumer (``queue/filter_marks.py``). So in a queue of several consumers an end counts
where the consumer's filters match the job's subject, which the queue or the archive tells. Where neither has the job,
or the user may not read them, the end counts as it is stated.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from airflow_provider_jetstream.jetstream.archive import ArchiveReader
from airflow_provider_jetstream.jetstream.client.concurrency import MAX_CONCURRENT, map_concurrently
from airflow_provider_jetstream.jetstream.client.message_reader import get_message
from airflow_provider_jetstream.jetstream.client.stream_api import list_consumers, stream_info
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    NotFoundError,
    PermissionDeniedError,
    TransientError,
)
from airflow_provider_jetstream.jetstream.queue.consumer_state import filter_subjects
from airflow_provider_jetstream.jetstream.queue.filter_marks import may_have_had
from airflow_provider_jetstream.jetstream.queue.undeclared_changes import provisioned_declaration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
    from airflow_provider_jetstream.jetstream.waiting.event_source import EndSource
    from airflow_provider_jetstream.jetstream.waiting.job_end import JobEnd

log = logging.getLogger(__name__)

_RETRY_PAUSE = 1.0


class _Consumer(NamedTuple):
    filters: tuple[str, ...]
    created: datetime


class ConsumerCheck:
    """Whether consumers of a queue may have had jobs, by their filters."""

    def __init__(self, connection: Connection, cursor: Cursor) -> None:
        self._connection = connection
        self._cursor = cursor
        self._consumers: dict[str, _Consumer] = {}
        # Many jobs that are looked at together ask once.
        self._asking = asyncio.Lock()

    def note_consumers(self, consumers: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the queue's consumers as they are now.

        :param consumers: CONSUMER.INFO by name
        """
        self._consumers = {
            name: _Consumer(filter_subjects(info["config"]), datetime.fromisoformat(info["created"]))
            for name, info in consumers.items()
        }

    def is_only(self, consumer: str) -> bool:
        """Return whether the queue is known to have this consumer and no other."""
        return self._consumers.keys() == {consumer}

    async def may_have_had(self, pairs: Sequence[tuple[str, int]]) -> list[bool]:
        """Return for each pair whether the consumer may have had the job; true where that can't be known.

        :param pairs: names of consumers and stream sequences of jobs
        :raises TransientError: the server doesn't answer just now
        """
        try:
            async with self._asking:
                named = {consumer for consumer, _ in pairs}
                if not self._consumers.keys() >= named:
                    self.note_consumers(await list_consumers(self._connection, self._cursor.queue))
            if len(self._consumers.keys() | named) <= 1:
                return [True] * len(pairs)
            info = await stream_info(self._connection, self._cursor.queue)
            sequences = sorted({sequence for _, sequence in pairs})
            jobs = dict(zip(sequences, await self._read_jobs(sequences, info), strict=True))
        except (NotFoundError, PermissionDeniedError, ApiError) as error:
            log.debug("Which consumers had jobs of %s can't be seen: %s", self._cursor.queue, error)
            return [True] * len(pairs)
        return [
            job is None or may_have_had(info["config"], self._consumers, *pair, job.subject, job.stored_at)
            for pair in pairs
            for job in [jobs[pair[1]]]
        ]

    async def _read_jobs(self, sequences: Sequence[int], info: Mapping[str, Any]) -> list[StoredMessage | None]:
        """Return jobs as the queue or the archive stores them; ``None`` where neither does."""

        async def stored(sequence: int) -> StoredMessage | None:
            return await get_message(self._connection, self._cursor.queue, sequence)

        jobs = await map_concurrently(stored, sequences)
        if None not in jobs:
            return jobs
        events = await stream_info(self._connection, self._cursor.events)
        queue, _ = provisioned_declaration(self._cursor.queue, [events])
        created = datetime.fromisoformat(info["created"])
        if queue is None or (archive := await ArchiveReader.open(self._connection, queue, created)) is None:
            return jobs
        for place, sequence in enumerate(sequences):
            jobs[place] = jobs[place] or await archive.find(sequence)
        return jobs


class ClaimedEnds:
    """The ends of jobs that are held against the consumer that states them, before they count.

    :param on_believed: takes each that counts, in their order
    """

    def __init__(
        self, connection: Connection, cursor: Cursor, on_believed: Callable[[EndSource, JobEnd], None]
    ) -> None:
        self._connection = connection
        self._queue = cursor.queue
        self._on_believed = on_believed
        self._claims: asyncio.Queue[tuple[EndSource, JobEnd]] = asyncio.Queue()
        self.consumers = ConsumerCheck(connection, cursor)

    def take(self, source: EndSource, end: JobEnd) -> None:
        """Have an end count now, or once it is looked at."""
        if not end.consumer or (self.consumers.is_only(end.consumer) and self._claims.empty()):
            self._on_believed(source, end)
        else:
            self._claims.put_nowait((source, end))

    async def settled(self) -> None:
        """Wait until each end counts, or doesn't."""
        await self._claims.join()

    async def run(self) -> None:
        """Look at the ends, without end."""
        while True:
            claims = [await self._claims.get()]
            while len(claims) < MAX_CONCURRENT and not self._claims.empty():
                claims.append(self._claims.get_nowait())
            while True:
                try:
                    believed = await self.consumers.may_have_had([(end.consumer, end.sequence) for _, end in claims])
                    break
                except TransientError as error:
                    if self._connection.is_closed:
                        raise
                    log.warning("Reading %s failed, trying again: %s", self._queue, error)
                    await asyncio.sleep(_RETRY_PAUSE)
            for (source, end), is_believed in zip(claims, believed, strict=True):
                if is_believed:
                    self._on_believed(source, end)
                else:
                    log.warning(
                        "What consumer %s of %s states about job %d doesn't count: its filters don't match the job",
                        *(end.consumer, self._queue, end.sequence),
                    )
                self._claims.task_done()
