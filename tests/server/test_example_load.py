"""The load of ``jetstream-queue dev``: it outlives a queue that fills because nobody redrives its dead letters."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.dev.example_load import create_queues, publish_without_end
from airflow_provider_jetstream.jetstream import ConnectionSettings, connect
from testbed.face import stream_info
from testbed.queues import eventually, stored_count

if TYPE_CHECKING:
    from testbed.nats_server import NatsServer


@pytest.mark.slow
async def test_a_full_queue_ends_no_publishing_and_takes_jobs_again_once_it_has_room(own_nats: NatsServer) -> None:
    async with connect(ConnectionSettings(servers=(own_nats.url,))) as connection:
        await create_queues(connection)
        receipts, thumbnails = [await stored_count(connection, name) for name in ("receipts", "thumbnails")]
        config = (await stream_info(connection, "thumbnails"))["config"]
        await connection.api("STREAM.UPDATE.thumbnails", config | {"max_msgs": thumbnails})
        publishing = asyncio.ensure_future(publish_without_end(connection, 0.01))

        async def grows(name: str, above: int) -> bool:
            return publishing.done() or await stored_count(connection, name) > above

        try:
            await eventually(lambda: grows("receipts", receipts + 5))
            assert not publishing.done()
            assert await stored_count(connection, "thumbnails") == thumbnails
            assert (await stream_info(connection, "thumbnails"))["state"]["first_seq"] == 1
            await connection.api("STREAM.UPDATE.thumbnails", config)
            await eventually(lambda: grows("thumbnails", thumbnails))
            assert not publishing.done()
        finally:
            publishing.cancel()
