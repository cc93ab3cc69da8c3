"""Removing finished entries from a dead letter queue, in the way that its configuration allows."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.dead_letters import require_dead_letters
from airflow_provider_jetstream.jetstream.errors import ApiError, TransientError
from airflow_provider_jetstream.jetstream.names import late_ack_subject
from airflow_provider_jetstream.jetstream.stored import get_message, stream_info

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.connection import Connection
    from airflow_provider_jetstream.jetstream.queue import WorkQueue

_OWN_CONSUMER = "redrive"
_PULL_BATCH = 500
_PULL_PAUSE = 0.05


async def remove_entries(connection: Connection, queue: WorkQueue, entries: Sequence[int]) -> int:
    """Remove entries that were acted on.

    Entries that can't be removed do no harm: their job is gone, so they are never taken for dead letters again.

    :param connection: the server
    :param queue: the work queue
    :param entries: sequences in its dead letter queue
    :return: how many had to stay
    """
    if not entries:
        return 0
    letters = require_dead_letters(queue).name
    config = (await stream_info(connection, letters))["config"]
    if not config.get("deny_delete"):
        return await _delete(connection, letters, entries)
    if config["retention"] == "workqueue":
        return await _acknowledge(connection, letters, entries)
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


async def _acknowledge(connection: Connection, letters: str, entries: Sequence[int]) -> int:
    consumer = await _consumer(connection, letters)
    await _deliver_up_to(connection, letters, consumer, max(entries))
    left = 0
    for sequence in entries:
        with suppress(TransientError):
            await connection.request(late_ack_subject(letters, consumer, sequence), b"+ACK")
        left += await get_message(connection, letters, sequence) is not None
    return left


async def _consumer(connection: Connection, letters: str) -> str:
    names: list[str] = (await connection.api(f"CONSUMER.NAMES.{letters}")).get("consumers") or []
    if names:
        return names[0]
    config: dict[str, Any] = {
        "durable_name": _OWN_CONSUMER,
        "name": _OWN_CONSUMER,
        "ack_policy": "explicit",
        "deliver_policy": "all",
        "max_ack_pending": -1,
    }
    body = {"stream_name": letters, "config": config, "action": "create"}
    await connection.api(f"CONSUMER.CREATE.{letters}.{_OWN_CONSUMER}", body)
    return _OWN_CONSUMER


async def _deliver_up_to(connection: Connection, letters: str, consumer: str, sequence: int) -> None:
    """Have the server deliver entries, since only a delivered one can be acknowledged.

    What arrives isn't looked at: entries are known from reading the stream, and those that stay come back after the
    consumer's ack wait.
    """

    async def ignore(_: Msg) -> None:
        return

    inbox = connection.client.new_inbox()
    arrivals = await connection.client.subscribe(inbox, cb=ignore)
    request = json.dumps({"batch": _PULL_BATCH, "no_wait": True}).encode()
    try:
        async with asyncio.timeout(connection.timeout):
            while True:
                info = await connection.api(f"CONSUMER.INFO.{letters}.{consumer}")
                if info["delivered"]["stream_seq"] >= sequence or info["num_pending"] == 0:
                    return
                await connection.client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{letters}.{consumer}", request, reply=inbox)
                await asyncio.sleep(_PULL_PAUSE)
    except TimeoutError:
        # Too many unacknowledged entries for the consumer: what isn't delivered is counted as left.
        return
    finally:
        await arrivals.unsubscribe()
