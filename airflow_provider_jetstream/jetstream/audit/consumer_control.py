"""Pauses a consumer for a person, and resumes it; both are recorded in the queue's audit before they are done.

Protocol: CONSUMER.PAUSE, since server 2.11; the server compares the end of the pause with its own clock. The record is
on ``audit.<queue>.consumers.<consumer>``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.client.stream_api import PAUSE_LEVEL, ServerClock, consumer_info
from airflow_provider_jetstream.jetstream.errors import ArgumentError, ServerTooOldError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

# A consumer that is forgotten resumes by itself.
LONGEST_PAUSE: Final = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class ConsumerControl:
    """A consumer after it was paused or resumed.

    :param paused_until: until when it is paused; ``None`` where it isn't
    :param recorded: whether the audit records it; a queue may have none
    """

    consumer: str
    paused_until: datetime | None
    recorded: bool


async def pause_consumer(
    connection: Connection,
    queue: WorkQueue,
    consumer: str,
    seconds: float,
    *,
    who: Mapping[str, Any],
    why: str | None = None,
) -> ConsumerControl:
    """Have the server deliver nothing to a consumer's workers for some time; what they have, they may finish.

    :param consumer: its name
    :raises ServerTooOldError: the server has no pauses
    :raises ArgumentError: the time is too long
    :raises NotFoundError: there is no such consumer
    """
    if not 0 < seconds <= LONGEST_PAUSE:
        raise ArgumentError(
            f"expected a pause of up to {LONGEST_PAUSE:g} s, found {seconds!r}: pause it again before it resumes"
        )
    info = await _require(connection, queue, consumer)
    until = (ServerClock.of(info).now() + timedelta(seconds=seconds)).astimezone(UTC)
    return await _control(connection, queue, consumer, until, who, why)


async def resume_consumer(
    connection: Connection, queue: WorkQueue, consumer: str, *, who: Mapping[str, Any], why: str | None = None
) -> ConsumerControl:
    """End a consumer's pause, whoever has set it.

    :param consumer: its name
    :raises ServerTooOldError: the server has no pauses
    :raises NotFoundError: there is no such consumer
    """
    await _require(connection, queue, consumer)
    return await _control(connection, queue, consumer, None, who, why)


async def _require(connection: Connection, queue: WorkQueue, consumer: str) -> dict[str, Any]:
    if connection.api_level < PAUSE_LEVEL:
        version = ".".join(map(str, connection.server_version))
        raise ServerTooOldError(
            f"expected nats-server 2.11 or later, which pauses consumers, found {version}: update it"
        )
    return dict(await consumer_info(connection, queue.name, consumer))


async def _control(
    connection: Connection,
    queue: WorkQueue,
    consumer: str,
    until: datetime | None,
    who: Mapping[str, Any],
    why: str | None,
) -> ConsumerControl:
    text = until.isoformat().replace("+00:00", "Z") if until else None
    if queue.audit is not None:
        record = {"version": 1, "action": "pause" if until else "resume", "until": text, "who": dict(who), "why": why}
        subject = f"audit.{queue.name}.consumers.{consumer}"
        # First: what isn't recorded isn't done.
        await store(connection, subject, json.dumps(record).encode())
    await connection.api(f"CONSUMER.PAUSE.{queue.name}.{consumer}", {"pause_until": text} if text else {})
    info = await consumer_info(connection, queue.name, consumer)
    found = info["config"].get("pause_until") if info.get("paused") else None
    return ConsumerControl(consumer, datetime.fromisoformat(found) if found else None, queue.audit is not None)
