"""The cache of cancellations that a worker holds."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream import cancel, get_message
from airflow_provider_jetstream.jetstream.cancellation.cache import follow_cancellations
from testbed.queues import make_queue, publish_jobs

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection


async def test_the_cache_holds_stored_cancellations_and_receives_new_ones(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    (sequence,) = await publish_jobs(connection, queue, ["job"])
    message = await get_message(connection, name, sequence)
    assert message is not None
    stored_at = message.stored_at
    await connection.client.jetstream().publish(f"cancelled.{name}.x", b"no cancellation")
    await cancel(connection, queue, "old", "one")
    await cancel(connection, queue, "old", "two")
    async with follow_cancellations(connection, queue) as book:
        known = book.get("old", stored_at)
        assert known is not None
        assert (known.why, book.get("new", stored_at)) == ("two", None)
        learning = asyncio.create_task(book.wait("new", stored_at))
        await cancel(connection, queue, "new", "three")
        async with asyncio.timeout(5):
            assert (await learning).why == "three"
