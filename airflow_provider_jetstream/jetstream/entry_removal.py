"""Removing finished entries from a dead letter queue, in the way that its configuration allows."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.dead_letters import require_dead_letters
from airflow_provider_jetstream.jetstream.errors import ApiError, NotFoundError, TransientError
from airflow_provider_jetstream.jetstream.names import MAX_DELIVERIES, late_ack_subject
from airflow_provider_jetstream.jetstream.stored import consumer_info, get_message, stream_info
from airflow_provider_jetstream.jetstream.subjects import covered_by_any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.connection import Connection
    from airflow_provider_jetstream.jetstream.queue import WorkQueue

log = logging.getLogger(__name__)

_PULL_BATCH = 500
_PULL_PAUSE = 0.05
_OWN_CONSUMER_STAYS = 300 * 1_000_000_000


async def remove_entries(connection: Connection, queue: WorkQueue, entries: Sequence[int]) -> int:
    """Remove entries that were acted on.

    Entries that can't be removed do no harm: their job is gone, so they are never taken for dead letters again. That is
    why nothing is raised.

    :param connection: the server
    :param queue: the work queue
    :param entries: sequences in its dead letter queue
    :return: how many had to stay, as far as is known
    """
    from nats import errors

    if not entries:
        return 0
    letters = require_dead_letters(queue).name
    try:
        config = (await stream_info(connection, letters))["config"]
        if not config.get("deny_delete"):
            return await _delete(connection, letters, entries)
        if config["retention"] == "workqueue":
            return await _acknowledge(connection, letters, queue.name, entries)
    except (ApiError, NotFoundError, TransientError, errors.Error) as error:
        log.warning("%d finished entries stay in %s: %s", len(entries), letters, error)
    return len(entries)


async def _delete(connection: Connection, letters: str, entries: Sequence[int]) -> int:
    left = 0
    for sequence in entries:
        try:
            # The server's default overwrites the message on disk, at milliseconds each.
            await connection.api(f"STREAM.MSG.DELETE.{letters}", {"seq": sequence, "no_erase": True})
        except (ApiError, TransientError):
            left += await get_message(connection, letters, sequence) is not None
    return left


async def _acknowledge(connection: Connection, letters: str, queue: str, entries: Sequence[int]) -> int:
    consumer = await _consumer(connection, letters, queue)
    waiting = sorted(entries, reverse=True)
    given_up = time.monotonic() + connection.timeout
    async with _pulling(connection, letters, consumer) as pull:
        while waiting and time.monotonic() < given_up:
            delivered = (await consumer_info(connection, letters, consumer))["delivered"]["stream_seq"]
            while waiting and waiting[-1] <= delivered:
                with suppress(TransientError):
                    await connection.request(late_ack_subject(letters, consumer, waiting.pop()), b"+ACK")
                given_up = time.monotonic() + connection.timeout
            if waiting:
                # Not beyond the last one: a delivery is one less for whoever processes the others.
                await pull(min(waiting[0] - delivered, _PULL_BATCH))
                await asyncio.sleep(_PULL_PAUSE)
    stored = [await get_message(connection, letters, sequence) is not None for sequence in entries]
    return sum(stored)


async def _consumer(connection: Connection, letters: str, queue: str) -> str:
    ours = f"{MAX_DELIVERIES}.{queue}.*"
    for info in (await connection.api(f"CONSUMER.LIST.{letters}")).get("consumers") or []:
        config = info["config"]
        if covered_by_any(config.get("filter_subjects") or [config.get("filter_subject") or ">"], ours):
            return str(info["name"])
    name = f"redrive-{queue}"
    config = {
        "durable_name": name,
        "name": name,
        "ack_policy": "explicit",
        "deliver_policy": "all",
        "filter_subject": ours,
        "max_ack_pending": -1,
        # As long as it exists, the server refuses other consumers of these entries.
        "inactive_threshold": _OWN_CONSUMER_STAYS,
    }
    await connection.api(
        f"CONSUMER.CREATE.{letters}.{name}.{ours}", {"stream_name": letters, "config": config, "action": "create"}
    )
    return name


@asynccontextmanager
async def _pulling(
    connection: Connection, letters: str, consumer: str
) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """Have the server deliver entries, since only a delivered one can be acknowledged.

    What arrives isn't looked at: entries are known from reading the stream, and those that stay come back after the
    consumer's ack wait.
    """

    async def ignore(_: Msg) -> None:
        return

    inbox = connection.client.new_inbox()
    arrivals = await connection.client.subscribe(inbox, cb=ignore)

    async def pull(count: int) -> None:
        request = json.dumps({"batch": count, "no_wait": True}).encode()
        await connection.client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{letters}.{consumer}", request, reply=inbox)

    try:
        yield pull
    finally:
        await arrivals.unsubscribe()
