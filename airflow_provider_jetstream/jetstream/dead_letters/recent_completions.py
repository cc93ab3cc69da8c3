"""What a queue's consumers have completed lately, as its events stream tells."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.advisories import AckMetric, Completion
from airflow_provider_jetstream.jetstream.client.concurrency import sleep
from airflow_provider_jetstream.jetstream.client.streams import read_bulk
from airflow_provider_jetstream.jetstream.contract import completion_filter
from airflow_provider_jetstream.jetstream.evidence import event_of
from airflow_provider_jetstream.jetstream.queue.end_evidence import ack_metric_filter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage

MOST_EVENTS = 4_000
_LEAST_EVENTS = 100
# Results of handlers may be as large as messages may be.
_MOST_BYTES = 32 * 2**20
_EVENTS_AT_ONCE = 256


@dataclass(slots=True)
class RecentCompletions:
    """When each consumer completed jobs, since a moment.

    :param since: from when on the completions are known
    """

    since: datetime
    _times: dict[str, array[float]] = field(default_factory=dict)

    def add(self, consumer: str, at: datetime) -> None:
        """Add a completion, not earlier than those before."""
        self._times.setdefault(consumer, array("d")).append(at.timestamp())

    def count(self, consumer: str, start: datetime, stop: datetime | None = None) -> int:
        """Count a consumer's completions later than ``start``, and not later than ``stop``."""
        times = self._times.get(consumer, array("d"))
        end = len(times) if stop is None else bisect_right(times, stop.timestamp())
        return max(0, end - bisect_right(times, start.timestamp()))

    def within(self, consumer: str, start: datetime, stop: datetime) -> int:
        """Count a consumer's completions from ``start`` to ``stop``, both included."""
        times = self._times.get(consumer, array("d"))
        return max(0, bisect_right(times, stop.timestamp()) - bisect_left(times, start.timestamp()))


async def read_recent_completions(connection: Connection, queue: str, info: Mapping[str, Any]) -> RecentCompletions:
    """Read the last 4,000 events of a queue at most; fewer where they are large.

    :param info: the server's STREAM.INFO of the queue's events stream
    """
    state = info["state"]
    average = max(1, int(state["bytes"]) // max(1, int(state["messages"])))
    most = min(MOST_EVENTS, max(_LEAST_EVENTS, _MOST_BYTES // average))
    start = max(1, int(state["first_seq"]), int(state["last_seq"]) - most + 1)
    filters = completion_filter(queue).removesuffix(">"), ack_metric_filter(queue).removesuffix("*")
    is_whole = start == 1 or not state["messages"]
    recent = RecentCompletions(datetime.fromisoformat(info["created"])) if is_whole else None
    # A worker may store a completion, and the server report the same job's acknowledgement.
    seen: set[tuple[str, int]] = set()
    count = 0
    async for message in read_bulk(connection, info, start):
        recent = recent or RecentCompletions(message.stored_at)
        end = _completed(message, queue, connection.domain) if message.subject.startswith(filters) else None
        if end and end not in seen:
            seen.add(end)
            recent.add(end[0], message.stored_at)
        count += 1
        if count % _EVENTS_AT_ONCE == 0:
            await sleep(0)
    return recent or RecentCompletions(datetime.fromisoformat(info["ts"]))


def _completed(message: StoredMessage, queue: str, domain: str) -> tuple[str, int] | None:
    """Return consumer and stream sequence of a completed job; ``None`` for an end of another kind."""
    event = event_of(message, queue, domain)
    return (event.consumer, event.stream_seq) if isinstance(event, AckMetric | Completion) else None
