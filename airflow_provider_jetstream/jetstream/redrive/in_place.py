"""Bringing all dead letters of a consumer back in their place: the consumer is reset to the first of them.

No copies, so it works when the queue is full and can't duplicate; but it is all of a consumer's letters or none, as
they are. The consumer is paused meanwhile, for a limited time, so that whoever is killed here leaves nothing standing.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.stream_api import consumer_info
from airflow_provider_jetstream.jetstream.errors import ApiError, NotFoundError, RedriveError, TransientError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.snapshot import ConsumerState

_PAUSE = timedelta(seconds=10)
_RENEWAL_SECONDS = 3.0
_LOOK_PAUSE = 0.1
_MARGIN = timedelta(seconds=5)


async def requeue(
    connection: Connection,
    queue: str,
    consumer: ConsumerState,
    record: Callable[[], Awaitable[int]],
) -> None:
    """Have a consumer deliver every stored job from its first dead letter on as if for the first time.

    :param connection: the server
    :param queue: the work queue
    :param consumer: the consumer, as a scan saw it
    :param record: proves the letters once more while nothing moves, writes down what is about to become true, and gives
        the first letter's stream sequence; 0 where there is none any more
    :raises RedriveError: jobs stay in flight, or the server refused; nothing was reset
    """
    try:
        async with _paused(connection, queue, consumer.name):
            await _wait_until_idle(connection, queue, consumer)
            if first := await record():
                await _require_standstill(connection, queue, consumer.name)
                await connection.api(f"CONSUMER.RESET.{queue}.{consumer.name}", {"seq": first})
    except ApiError as error:
        raise RedriveError(f"the server refused to reset consumer {consumer.name}: {error.description}") from None
    except NotFoundError as error:
        raise RedriveError(str(error)) from None


@asynccontextmanager
async def _paused(connection: Connection, queue: str, consumer: str) -> AsyncIterator[None]:
    before = (await consumer_info(connection, queue, consumer))["config"].get("pause_until")

    async def pause_on() -> None:
        while True:
            await asyncio.sleep(_RENEWAL_SECONDS)
            with suppress(ApiError, TransientError):
                await _pause(connection, queue, consumer, _soon())

    await _pause(connection, queue, consumer, _soon())
    renewal = asyncio.create_task(pause_on())
    try:
        yield
    finally:
        renewal.cancel()
        with suppress(ApiError, TransientError):
            # Someone else's pause stays as it was.
            await _pause(connection, queue, consumer, before)


def _soon() -> str:
    return (datetime.now(UTC) + _PAUSE).isoformat().replace("+00:00", "Z")


async def _pause(connection: Connection, queue: str, consumer: str, until: str | None) -> None:
    await connection.api(f"CONSUMER.PAUSE.{queue}.{consumer}", {"pause_until": until} if until else {})


async def _wait_until_idle(connection: Connection, queue: str, consumer: ConsumerState) -> None:
    given_up = time.monotonic() + (consumer.max_ack_wait + _MARGIN).total_seconds()
    while in_flight := (await consumer_info(connection, queue, consumer.name))["num_ack_pending"]:
        if time.monotonic() > given_up:
            raise RedriveError(
                f"expected no job of consumer {consumer.name} in flight, found {in_flight} still after its ack wait:"
                " a reset would deliver them a second time; wait for its workers, or redrive by copies"
            )
        await asyncio.sleep(_LOOK_PAUSE)


async def _require_standstill(connection: Connection, queue: str, consumer: str) -> None:
    info = await consumer_info(connection, queue, consumer)
    if not info.get("paused") or info["num_ack_pending"]:
        raise RedriveError(f"consumer {consumer} went on while it was to stand still; run it again")
