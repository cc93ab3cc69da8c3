"""Looking up whether the server reported that jobs were acknowledged, where nothing else tells."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.advisories import AckMetric, parse_advisory
from airflow_provider_jetstream.jetstream.client.message_reader import next_message, read_range
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.contract import ACK_METRIC

if TYPE_CHECKING:
    from collections.abc import Collection
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.client.connection import Connection


class AckMetrics:
    """The ack metrics of some jobs; read once, when they are asked for.

    :param connection: the server
    :param events: the stream that stores them, if any does
    :param queue: the work queue
    :param sequences: the jobs
    :param since: when the first of them was stored, or earlier
    """

    def __init__(
        self, connection: Connection, events: str | None, queue: str, sequences: Collection[int], since: datetime
    ) -> None:
        self._connection = connection
        self._events = events
        self._subject = f"{ACK_METRIC}.{queue}.*"
        self._sequences = frozenset(sequences)
        self._since = since
        self._found: set[int] | None = None
        self._reading = asyncio.Lock()

    async def is_acknowledged(self, sequence: int) -> bool:
        """Tell whether a job was acknowledged.

        :param sequence: its stream sequence
        :return: whether its ack metric is stored
        """
        if self._events is None or sequence not in self._sequences:
            return False
        return sequence in await self.acknowledged()

    async def acknowledged(self) -> set[int]:
        """Give those of the jobs that were acknowledged.

        :return: their stream sequences
        """
        if self._events is None or not self._sequences:
            return set()
        async with self._reading:
            if self._found is None:
                self._found = await self._read(self._events)
        return self._found

    async def _read(self, events: str) -> set[int]:
        found: set[int] = set()
        start = await self._start(events)
        async for message in read_range(self._connection, events, self._subject, start):
            metric = parse_advisory(message.data)
            if isinstance(metric, AckMetric) and metric.stream_seq in self._sequences:
                found.add(metric.stream_seq)
        return found

    async def _start(self, events: str) -> int:
        """Find the first event that may be about the jobs, by halving."""
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
