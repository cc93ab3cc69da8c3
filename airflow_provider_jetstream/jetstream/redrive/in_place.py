"""Requeues all dead letters of a consumer in place: the consumer is reset to the first of them.

Nothing is copied, so this works on a full queue and can't duplicate a job; but it brings back all of a consumer's
letters, unchanged, or none. The consumer is paused meanwhile, each time for a few seconds only: if this process is
killed, the consumer resumes by itself.

A reset that reaches the server when the consumer isn't paused any more would deliver live jobs once more, and the
server knows no deadline for requests. So before the reset the pause is made longer than a reset can be on its way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.consumer_pause import paused
from airflow_provider_jetstream.jetstream.client.stream_api import consumer_info, list_consumers
from airflow_provider_jetstream.jetstream.client.unsent import PING_SECONDS
from airflow_provider_jetstream.jetstream.errors import ApiError, NotFoundError, RedriveError, TransientError
from airflow_provider_jetstream.jetstream.queue.gate import held_problem
from airflow_provider_jetstream.jetstream.units import NANOSECONDS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.consumer_pause import ConsumerPause
    from airflow_provider_jetstream.jetstream.queue.consumer_state import ConsumerState

log = logging.getLogger(__name__)

_POLL_PAUSE = 0.1
_MARGIN = timedelta(seconds=5)
# The reset's time limit in seconds, whatever the connection's is.
_RESET_SECONDS = 10.0
# How long a reset that has failed may still be on its way: in a proxy, or in a server that is stopped.
_LATE_SECONDS = 30.0
# For the requests between the longer pause and the reset.
_CHECK_SECONDS = 10.0


async def requeue(
    connection: Connection,
    queue: str,
    consumer: ConsumerState,
    record: Callable[[], Awaitable[int]],
    require_lease: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Make a consumer deliver every stored job from its first dead letter on as if for the first time.

    :param record: proves the letters once more while nothing moves, records the requeue before it happens, and returns
        the first letter's stream sequence; 0 where there is none any more
    :param require_lease: raises unless nobody else can change the letters during one more request
    :raises RedriveError: jobs stay in flight, or the server refused; nothing was reset
    """
    try:
        async with paused(connection, queue, consumer.name) as pause:
            await _wait_until_idle(connection, queue, consumer)
            if first := await record():
                await _reset(connection, queue, consumer.name, first, pause, require_lease)
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


async def _reset(
    connection: Connection,
    queue: str,
    consumer: str,
    first: int,
    pause: ConsumerPause,
    require_lease: Callable[[], Awaitable[None]] | None,
) -> None:
    limit = min(connection.timeout, _RESET_SECONDS)
    needed = limit + PING_SECONDS + _LATE_SECONDS
    await pause.prolong(needed + _CHECK_SECONDS)
    delivered, paused_until = await _require_idle(connection, queue, consumer)
    if require_lease:
        await require_lease()
    if (left := paused_until - time.monotonic()) < needed:
        raise RedriveError(
            f"expected consumer {consumer} to be paused for {needed:g} s more, found {left:.1f} s: a reset that takes"
            " longer would deliver live jobs once more; nothing was reset; run it again"
        )
    try:
        await connection.api(f"CONSUMER.RESET.{queue}.{consumer}", {"seq": first}, time_limit=limit)
    except TransientError as error:
        if not await _was_reset(connection, queue, consumer, delivered):
            # Should it arrive, it finds the consumer paused.
            pause.left_alone = True
            raise RedriveError(
                f"consumer {consumer} isn't known to be reset ({error}); it stays paused for at most"
                f" {needed + _CHECK_SECONDS:g} s, in which a reset that is on its way does no harm; run it again after"
                " that"
            ) from None


async def _require_idle(connection: Connection, queue: str, consumer: str) -> tuple[int, float]:
    """Raise unless a reset would deliver nothing but dead letters.

    :return: the consumer's sequence of deliveries, and until when it is paused, by this process's monotonic clock
    """
    sent_at = time.monotonic()
    consumers = await list_consumers(connection, queue)
    if problem := held_problem(queue, consumers.held_above):
        raise RedriveError(f"expected only dead letters to be stored and delivered, found that {problem}; run it again")
    info = consumers.get(consumer, {})
    if not info.get("paused") or info["num_ack_pending"]:
        raise RedriveError(f"consumer {consumer} delivered jobs while it was paused for the reset; run it again")
    # The time that is left by the server's clock, which ends the pause.
    return int(info["delivered"]["consumer_seq"]), sent_at + info["pause_remaining"] / NANOSECONDS


async def _was_reset(connection: Connection, queue: str, consumer: str, delivered: int) -> bool:
    """Look whether a reset that wasn't answered has arrived; as long as it may arrive, until the server answers.

    :param delivered: the consumer's sequence of deliveries before, with which a reset begins anew
    """
    deadline = time.monotonic() + _LATE_SECONDS
    while True:
        try:
            info = await consumer_info(connection, queue, consumer)
        except TransientError as error:
            if time.monotonic() > deadline:
                log.warning("It isn't known whether consumer %s was reset: %s", consumer, error)
                return False
            await asyncio.sleep(_POLL_PAUSE)
        else:
            return int(info["delivered"]["consumer_seq"]) < delivered
