"""Looks whether the server, as it is configured now, stores any evidence of how the jobs of each consumer end.

Provisioning sees to it that it does. But a worker that creates or updates its consumer without a ``sample_freq`` resets
it on the server, and then a job that is only acknowledged is gone without a trace. What else isn't as provisioned
is named too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.message_reader import next_message
from airflow_provider_jetstream.jetstream.client.stream_api import list_consumers, stream_info
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import consumer_completion_filter
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.jetstream.queue.end_evidence import ALL_SAMPLED, ack_metric_filter, sampled_percent
from airflow_provider_jetstream.jetstream.queue.undeclared_changes import (
    log_changes,
    provisioned_declaration,
    undeclared_changes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor

log = logging.getLogger(__name__)

# Many waits that start together look once.
_PAUSE = 1.0


class EndEvidenceCheck:
    """The consumers of a queue whose acknowledged jobs may leave no evidence.

    :param on_consumers: takes CONSUMER.INFO of the consumers by name, whenever they are looked at
    """

    def __init__(
        self,
        connection: Connection,
        cursor: Cursor,
        on_consumers: Callable[[Mapping[str, Mapping[str, Any]]], None] = lambda _: None,
    ) -> None:
        self._on_consumers = on_consumers
        self._connection = connection
        self._queue = cursor.queue
        self._events = cursor.events
        self._completing: set[str] = set()
        self._warned: dict[str, str] = {}
        self._requested = asyncio.Event()
        # By consumer, why the server didn't report each acknowledgement, and when that was seen last.
        self._unsampled: dict[str, tuple[str, float]] = {}

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

    async def check(self, consumers: Mapping[str, Mapping[str, Any]]) -> None:
        """Look at the consumers and at the events stream, and warn of consumers whose jobs end unseen.

        :param consumers: CONSUMER.INFO by name
        """
        self._on_consumers(consumers)
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
                " so a job that a worker only acknowledges counts as vanished; provision the queue again, which sets"
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
