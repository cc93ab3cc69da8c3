"""The consumers of a queue: which of them may have had a job, and which of them leave no evidence of how jobs end.

A worker may name the job of any consumer (``queue/filter_marks.py``). So in a queue of several consumers an end counts
where the consumer's filters match the job's subject, which the queue or the archive tells. Where neither has the job,
or the user may not read them, the end counts as it is stated.

Provisioning sees to it that the server stores how the jobs of each consumer end. But a worker that creates or updates
its consumer without a ``sample_freq`` resets it on the server, and then a job that is only acknowledged is gone without
a trace. What else isn't as provisioned is named too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from airflow_provider_jetstream.jetstream.archive import ArchiveReader
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.message_reader import get_message, next_message
from airflow_provider_jetstream.jetstream.client.stream_api import list_consumers, stream_info
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import consumer_completion_filter
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    JetStreamProviderError,
    NotFoundError,
    PermissionDeniedError,
)
from airflow_provider_jetstream.jetstream.queue.consumer_state import filter_subjects
from airflow_provider_jetstream.jetstream.queue.end_evidence import ALL_SAMPLED, ack_metric_filter, sampled_percent
from airflow_provider_jetstream.jetstream.queue.filter_marks import may_have_had
from airflow_provider_jetstream.jetstream.queue.undeclared_changes import (
    log_changes,
    provisioned_declaration,
    undeclared_changes,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor

log = logging.getLogger(__name__)

# Many waits that start together look once.
_PAUSE = 1.0


class _Consumer(NamedTuple):
    filters: tuple[str, ...]
    created: datetime


class QueueConsumers:
    """The consumers of a queue, as they were last read."""

    def __init__(self, connection: Connection, cursor: Cursor) -> None:
        self._connection = connection
        self._queue = cursor.queue
        self._events = cursor.events
        self._consumers: dict[str, _Consumer] = {}
        # Many jobs that are looked at together ask once.
        self._asking = asyncio.Lock()
        self._completing: set[str] = set()
        self._warned: dict[str, str] = {}
        self._requested = asyncio.Event()
        # By consumer, why the server didn't report each acknowledgement, and when that was seen last.
        self._unsampled: dict[str, tuple[str, float]] = {}

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
                    self._note(await list_consumers(self._connection, self._queue))
            if len(self._consumers.keys() | named) <= 1:
                return [True] * len(pairs)
            info = await stream_info(self._connection, self._queue)
            sequences = sorted({sequence for _, sequence in pairs})
            jobs = dict(zip(sequences, await self._read_jobs(sequences, info), strict=True))
        except (NotFoundError, PermissionDeniedError, ApiError) as error:
            log.debug("Which consumers had jobs of %s can't be seen: %s", self._queue, error)
            return [True] * len(pairs)
        return [
            job is None or may_have_had(info["config"], self._consumers, *pair, job.subject, job.stored_at)
            for pair in pairs
            for job in [jobs[pair[1]]]
        ]

    async def _read_jobs(self, sequences: Sequence[int], info: Mapping[str, Any]) -> list[StoredMessage | None]:
        """Return jobs as the queue or the archive stores them; ``None`` where neither does."""

        async def stored(sequence: int) -> StoredMessage | None:
            return await get_message(self._connection, self._queue, sequence)

        jobs = await map_concurrently(stored, sequences)
        if None not in jobs:
            return jobs
        events = await stream_info(self._connection, self._events)
        queue, _ = provisioned_declaration(self._queue, [events])
        if queue is None or (archive := await ArchiveReader.open(self._connection, queue, info)) is None:
            return jobs
        for place, sequence in enumerate(sequences):
            jobs[place] = jobs[place] or await archive.find(sequence)
        return jobs

    def request(self) -> None:
        """Have :meth:`run` look again, since a wait begins whose jobs need this evidence."""
        self._requested.set()

    def unsampled_since(self, moment: float) -> dict[str, str]:
        """Return by consumer why the server didn't report each of its acknowledgements at any time since a moment.

        Also where it does so now, or the consumer is gone: what was acknowledged before left no evidence.

        :param moment: in seconds of the monotonic clock
        """
        return {name: reason for name, (reason, seen_at) in self._unsampled.items() if seen_at >= moment}

    async def run(self) -> None:
        """Look after each request, without end."""
        while True:
            await self._requested.wait()
            self._requested.clear()
            try:
                await self.check(await list_consumers(self._connection, self._queue))
            except JetStreamProviderError as error:
                if self._connection.is_closed:
                    raise
                # Nor for a lack of permission: a wait needs no evidence about its evidence.
                log.debug("Whether the ends of jobs of %s are stored can't be seen now: %s", self._queue, error)
            await asyncio.sleep(_PAUSE)

    def _note(self, consumers: Mapping[str, Mapping[str, Any]]) -> None:
        self._consumers = {
            name: _Consumer(filter_subjects(info["config"]), datetime.fromisoformat(info["created"]))
            for name, info in consumers.items()
        }

    async def check(self, consumers: Mapping[str, Mapping[str, Any]]) -> None:
        """Look at the consumers and at the events stream, and warn of consumers whose jobs end unseen.

        :param consumers: CONSUMER.INFO by name
        """
        self._note(consumers)
        events = await stream_info(self._connection, self._events)
        provisioned, _ = provisioned_declaration(self._queue, [events])
        if provisioned is not None:
            log_changes(self._queue, undeclared_changes(provisioned, {self._events: events}, consumers))
        subjects = events["config"].get("subjects") or []
        metrics = ack_metric_filter(self._queue)
        uncaptured = None if covered_by_any(subjects, metrics) else f"{self._events} doesn't capture {metrics}"
        reasons = {
            name: _why_unsampled(info["config"]) or uncaptured
            for name, info in consumers.items()
            # One without acknowledgements is internal: it copies messages to another stream.
            if info["config"].get("ack_policy") != "none"
        }
        unsampled = {name: reason for name, reason in reasons.items() if reason}
        self._unsampled |= {name: (reason, time.monotonic()) for name, reason in unsampled.items()}
        for name in unsampled.keys() - self._completing:
            completions = consumer_completion_filter(self._queue, name)
            if await next_message(self._connection, self._events, 1, completions) is not None:
                self._completing.add(name)
        unseen = {name: why for name, why in unsampled.items() if name not in self._completing}
        for name in unseen.keys() - self._warned.keys():
            log.warning(
                "The ends of jobs of consumer %s of %s may go unseen: %s, and no worker has stored a completion there,"
                " so a job that a worker only acknowledges counts as unaccounted; provision the queue again, which sets"
                " sample_freq to %s (a worker that creates the consumer itself without it resets it: let it bind to the"
                " one that exists), or run workers that store completions",
                name,
                self._queue,
                unseen[name],
                ALL_SAMPLED,
            )
        self._warned = unseen


def _why_unsampled(config: Mapping[str, Any]) -> str | None:
    share = config.get("sample_freq")
    if sampled_percent(share) >= sampled_percent(ALL_SAMPLED):
        return None
    return f"its sample_freq is {share}" if share else "its sample_freq is unset"
