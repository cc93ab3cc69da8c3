"""Since when a standalone server has certainly not restarted: its lower bound is the age of a consumer in memory.

A server that is killed forgets the last second of its consumers' states, while the streams keep what it had published
about them by then. So a published death can be believed only if the server hasn't restarted since. Measured with
nats-server 2.10.27, 2.11.0, 2.12.0, 2.14.0 and 2.15.0: a durable consumer with ``mem_storage`` is gone after a restart,
graceful or not. The audit has one that nobody pulls from; provisioning creates it, and so does each scan that misses
it.

In a cluster it proves nothing, since the cluster creates it again on another server or with its old age. There
CONSUMER.INFO says since when a server has led the consumer (nats-server 2.12 and later).
"""

from __future__ import annotations

import logging
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.stream_api import consumer_info
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, NotFoundError, PermissionDeniedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection

log = logging.getLogger(__name__)

UPTIME_CONSUMER = "uptime"

_CONFIG = {
    "name": UPTIME_CONSUMER,
    "durable_name": UPTIME_CONSUMER,
    "description": "gone after a restart: its age says since when the server has been up",
    "ack_policy": "none",
    "deliver_policy": "new",
    "replay_policy": "instant",
    "mem_storage": True,
    "num_replicas": 1,
}


async def server_up_since(connection: Connection, stream: Mapping[str, Any]) -> datetime | None:
    """Return since when the server of a stream certainly hasn't restarted; begin to watch it where nothing does yet.

    :param stream: the server's STREAM.INFO of the audit
    :return: ``None`` where that can't be known: the stream is clustered, or the consumer can't be created
    """
    # STREAM.INFO of a server of its own has a leader here, too, but no cluster's name.
    if (stream.get("cluster") or {}).get("name"):
        return None
    name = stream["config"]["name"]
    try:
        info = await _existing(connection, name) or await _create(connection, name)
    except JetStreamProviderError as error:
        level = logging.INFO if isinstance(error, PermissionDeniedError) else logging.DEBUG
        log.log(level, "Since when the server of %s has been up isn't known: %s", name, error)
        return None
    # One that somebody stored in a file survives restarts.
    return datetime.fromisoformat(info["created"]) if info["config"].get("mem_storage") else None


async def watch_server(connection: Connection, stream: Mapping[str, Any]) -> None:
    """Begin to watch the server of a stream, unless something does.

    :param stream: the server's STREAM.INFO of the audit
    """
    if not stream["state"].get("consumer_count"):
        await server_up_since(connection, stream)


async def _existing(connection: Connection, stream: str) -> dict[str, Any] | None:
    with suppress(NotFoundError):
        return await consumer_info(connection, stream, UPTIME_CONSUMER)
    return None


async def _create(connection: Connection, stream: str) -> dict[str, Any]:
    request = {"stream_name": stream, "config": _CONFIG, "action": "create"}
    return await connection.api(f"CONSUMER.CREATE.{stream}.{UPTIME_CONSUMER}", request)
