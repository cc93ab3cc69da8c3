"""Pauses a consumer for a few seconds at a time: if this process is killed, the consumer resumes by itself.

Protocol: the NATS documentation, "JetStream wire API reference", CONSUMER.PAUSE; needs server 2.11. The server compares
the end of the pause with its own clock, so it is calculated from the server's time.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.server_clock import ServerClock
from airflow_provider_jetstream.jetstream.client.stream_api import consumer_info
from airflow_provider_jetstream.jetstream.errors import ApiError, TransientError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from airflow_provider_jetstream.jetstream.client.connection import Connection

# The level of JetStream's API that knows pauses.
PAUSE_LEVEL = 1

_PAUSE = timedelta(seconds=10)
_RENEWAL_SECONDS = 3.0


@asynccontextmanager
async def paused(connection: Connection, stream: str, consumer: str) -> AsyncIterator[None]:
    """Pause a consumer for the block, and restore a longer pause that was set before.

    Deliveries in flight go on and can be acknowledged. A pause that can't be renewed runs out: before a step that
    depends on it, read CONSUMER.INFO's ``paused``.

    :raises NotFoundError: the stream or the consumer doesn't exist
    :raises ApiError: the server refused
    """
    info = await consumer_info(connection, stream, consumer)
    before, clock = info["config"].get("pause_until"), ServerClock.of(info)
    if before and datetime.fromisoformat(before) <= clock.answered_at + _PAUSE:
        # That of a process that was killed, or as good as over.
        before = None

    def pause_end() -> str:
        return (clock.now() + _PAUSE).astimezone(UTC).isoformat().replace("+00:00", "Z")

    async def keep_paused() -> None:
        while True:
            await asyncio.sleep(_RENEWAL_SECONDS)
            with suppress(ApiError, TransientError):
                await _set_pause(connection, stream, consumer, pause_end())

    await _set_pause(connection, stream, consumer, pause_end())
    renewal = asyncio.create_task(keep_paused())
    try:
        yield
    finally:
        renewal.cancel()
        with suppress(ApiError, TransientError):
            # A pause that was set before stays as it was.
            await _set_pause(connection, stream, consumer, before)


async def _set_pause(connection: Connection, stream: str, consumer: str, until: str | None) -> None:
    await connection.api(f"CONSUMER.PAUSE.{stream}.{consumer}", {"pause_until": until} if until else {})
