"""Finds out whether the server reported that jobs were acknowledged, for jobs that left no other evidence."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.advisories import AckMetric
from airflow_provider_jetstream.jetstream.client.bulk_read import first_since
from airflow_provider_jetstream.jetstream.client.message_reader import next_message, read_range
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.contract import ACK_METRIC
from airflow_provider_jetstream.jetstream.evidence import event_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.client.connection import Connection

# Windows that are so near are read together.
_NEAR = timedelta(minutes=1)


class AckMetrics:
    """The ack metrics of some jobs, read once they are needed.

    :param events: the stream that stores them, if any does
    :param queue: the work queue
    :param sequences: the jobs' stream sequences
    :param since: when the first of the jobs was stored, or earlier
    """

    def __init__(
        self, connection: Connection, events: str | None, queue: str, sequences: Collection[int], since: datetime
    ) -> None:
        self._connection = connection
        self._events = events
        self._queue = queue
        self._subject = f"{ACK_METRIC}.{queue}.*"
        self._sequences = frozenset(sequences)
        self._since = since
        self._acknowledged: dict[int, datetime] | None = None
        self._reading = asyncio.Lock()

    async def is_acknowledged(self, sequence: int) -> bool:
        """Return whether the ack metric of a job is stored."""
        return await self.acknowledged_at(sequence) is not None

    async def acknowledged_at(self, sequence: int) -> datetime | None:
        """Return when the last ack metric of a job was stored; ``None`` where none is."""
        if self._events is None or sequence not in self._sequences:
            return None
        return (await self.acknowledged()).get(sequence)

    async def acknowledged_within(self, windows: Mapping[int, tuple[datetime, datetime]]) -> dict[int, list[datetime]]:
        """Return when the ack metrics of jobs were stored, each as far as that was between two times.

        :param windows: the two times by the job's stream sequence; those that are near are read together
        """
        found: dict[int, list[datetime]] = {}
        if self._events is None or not windows:
            return found
        info = await stream_info(self._connection, self._events)
        parts: list[list[datetime]] = []
        for start, stop in sorted(windows.values()):
            if parts and start <= parts[-1][1] + _NEAR:
                parts[-1][1] = max(stop, parts[-1][1])
            else:
                parts.append([start, stop])
        for start, stop in parts:
            first = await first_since(self._connection, info, start)
            async for message in read_range(self._connection, self._events, self._subject, first):
                if message.stored_at > stop:
                    break
                metric = event_of(message, self._queue, self._connection.domain)
                if isinstance(metric, AckMetric) and metric.stream_seq in windows:
                    found.setdefault(metric.stream_seq, []).append(message.stored_at)
        return found

    async def acknowledged(self) -> dict[int, datetime]:
        """Return by stream sequence when the last ack metric of each job was stored, for those that have one."""
        if self._events is None or not self._sequences:
            return {}
        async with self._reading:
            if self._acknowledged is None:
                self._acknowledged = await self._read(self._events)
        return self._acknowledged

    async def _read(self, events: str) -> dict[int, datetime]:
        acknowledged: dict[int, datetime] = {}
        start = await self._first_event(events)
        async for message in read_range(self._connection, events, self._subject, start):
            metric = event_of(message, self._queue, self._connection.domain)
            if isinstance(metric, AckMetric) and metric.stream_seq in self._sequences:
                acknowledged[metric.stream_seq] = message.stored_at
        return acknowledged

    async def _first_event(self, events: str) -> int:
        """Find the first event that may be about the jobs, by binary search over the times."""
        state = (await stream_info(self._connection, events))["state"]
        low, high = int(state["first_seq"]), int(state["last_seq"])
        while low < high:
            middle = (low + high) // 2
            message = await next_message(self._connection, events, middle, ">")
            if message is None or message.stored_at >= self._since:
                high = middle
            else:
                low = message.sequence + 1
        return max(low, 1)
