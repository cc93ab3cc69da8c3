"""Requeues all dead letters of a consumer in place: the consumer is reset to the first of them.

Nothing is copied, so this works on a full queue and can't duplicate a job; but it brings back all of a consumer's
letters, unchanged, or none. The consumer is paused meanwhile, each time for a few seconds only: if this process is
killed, the consumer resumes by itself.
"""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.consumer_pause import paused
from airflow_provider_jetstream.jetstream.client.stream_api import consumer_info, list_consumers
from airflow_provider_jetstream.jetstream.errors import ApiError, NotFoundError, RedriveError
from airflow_provider_jetstream.jetstream.queue.gate import held_problem

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.consumer_state import ConsumerState

_POLL_PAUSE = 0.1
_MARGIN = timedelta(seconds=5)


async def requeue(
    connection: Connection,
    queue: str,
    consumer: ConsumerState,
    record: Callable[[], Awaitable[int]],
) -> None:
    """Make a consumer deliver every stored job from its first dead letter on as if for the first time.

    :param record: proves the letters once more while nothing moves, records the requeue before it happens, and returns
        the first letter's stream sequence; 0 where there is none any more
    :raises RedriveError: jobs stay in flight, or the server refused; nothing was reset
    """
    try:
        async with paused(connection, queue, consumer.name):
            await _wait_until_idle(connection, queue, consumer)
            if first := await record():
                await _require_idle(connection, queue, consumer.name)
                await connection.api(f"CONSUMER.RESET.{queue}.{consumer.name}", {"seq": first})
    except ApiError as error:
        raise RedriveError(f"the server refused to reset consumer {consumer.name}: {error.description}") from None
    except NotFoundError as error:
        raise RedriveError(str(error)) from None


async def _wait_until_idle(connection: Connection, queue: str, consumer: ConsumerState) -> None:
    deadline = time.monotonic() + (consumer.max_ack_wait + _MARGIN).total_seconds()
    while in_flight := (await consumer_info(connection, queue, consumer.name))["num_ack_pending"]:
        if time.monotonic() > deadline:
            raise RedriveError(
                f"expected no job of consumer {consumer.name} in flight, found {in_flight} still after its ack wait:"
                " a reset would deliver them a second time; wait for its workers, or redrive by copies"
            )
        await asyncio.sleep(_POLL_PAUSE)


async def _require_idle(connection: Connection, queue: str, consumer: str) -> None:
    consumers = await list_consumers(connection, queue)
    if problem := held_problem(queue, consumers.held_above):
        raise RedriveError(f"expected only dead letters to be stored and delivered, found that {problem}; run it again")
    info = consumers.get(consumer, {})
    if not info.get("paused") or info["num_ack_pending"]:
        raise RedriveError(f"consumer {consumer} delivered jobs while it was paused for the reset; run it again")
