"""Whether messages wait on a consumer, found out without taking one.

A pull request that no message fits is answered the moment a message can be delivered, whether for the first time or
again after its ack wait or backoff; the message and its delivery count stay as they were (:mod:`.advisory_probe` has
the measurements). The counts of ``CONSUMER.INFO`` alone don't tell a message that is being worked on from one whose
worker died. While the consumer is paused or at its ``max_ack_pending``, no message can be delivered.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.advisory_probe import can_deliver
from airflow_provider_jetstream.jetstream.client.stream_api import PINNED, consumer_info
from airflow_provider_jetstream.jetstream.errors import UnsuitableQueueError
from airflow_provider_jetstream.jetstream.units import NANOSECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection

_AT_ONCE = 0.05
# Seconds of one request, and its part of the connection's time limit.
_LONGEST_REQUEST = 5.0
_PART = 0.5
# A message that arrives while a worker's pull request is open is that worker's: long enough for it to get there.
_CONFIRM_AFTER = 0.25


@dataclass(frozen=True, slots=True)
class WaitingMessages:
    """The messages that a consumer could deliver.

    :param waiting: how many haven't been delivered yet, or 1 where all that wait were delivered before
    :param in_flight: how many were delivered and aren't settled, messages that wait for another delivery included
    :param deliveries: how many deliveries the consumer has made so far; it begins anew where it is reset or recreated
    """

    stream: str
    consumer: str
    waiting: int
    in_flight: int
    deliveries: int

    def as_json(self) -> dict[str, Any]:
        """Return the fields of an event."""
        return {name: value for name, value in asdict(self).items() if name != "deliveries"}


async def wait_for_messages(
    connection: Connection, stream: str, consumer: str, seconds: float = 0.0
) -> WaitingMessages | None:
    """Wait until a consumer could deliver a message, and nobody takes it.

    :param seconds: for how long; 0 to look once
    :return: ``None`` where there was none
    :raises NotFoundError: the stream or the consumer doesn't exist
    :raises UnsuitableQueueError: the consumer delivers messages without being asked, or to one pinned client
    """
    end = time.monotonic() + seconds
    while True:
        info = await consumer_info(connection, stream, consumer)
        config = info["config"]
        if config.get("deliver_subject"):
            raise UnsuitableQueueError(
                f"expected a pull consumer, found that {consumer} of {stream} pushes messages to a subject: recreate it"
                " without a deliver_subject"
            )
        if config.get("priority_policy") == PINNED:
            raise UnsuitableQueueError(
                f"expected a consumer that can be asked whether messages wait, found that {consumer} of {stream} has"
                f" the priority policy {PINNED}: a request may take the pin from its client; set priority_policy to"
                " overflow or prioritized"
            )
        left = end - time.monotonic()
        if await _probe(connection, stream, config, left):
            await asyncio.sleep(_CONFIRM_AFTER)
            if await _probe(connection, stream, config):
                info = await consumer_info(connection, stream, consumer)
                if info["num_pending"] or info["num_ack_pending"]:
                    deliveries = int(info["delivered"]["consumer_seq"])
                    waiting, in_flight = info["num_pending"] or 1, info["num_ack_pending"]
                    return WaitingMessages(stream, consumer, waiting, in_flight, deliveries)
                # The request was refused for another reason, such as too many open requests.
            await asyncio.sleep(_CONFIRM_AFTER)
        if time.monotonic() >= end:
            return None


async def _probe(connection: Connection, stream: str, config: Mapping[str, Any], seconds: float = 0.0) -> bool:
    """Return whether the server can deliver a message within a number of seconds."""
    longest = min(_LONGEST_REQUEST, _PART * connection.timeout, (config.get("max_expires") or 1e18) / NANOSECONDS)
    name = config.get("durable_name") or config["name"]
    return await can_deliver(
        connection, stream, config, name, min(longest, max(seconds, _AT_ONCE)), no_wait=seconds <= _AT_ONCE
    )
