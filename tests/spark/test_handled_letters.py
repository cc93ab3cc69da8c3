"""Spark doesn't read or redrive letters that a handler of the dead letter queue has handled."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import nats
import pytest
from bulk_letters import make_letters, stored_messages

from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES
from airflow_provider_jetstream.jetstream.errors import RedriveRequestError
from airflow_provider_jetstream.spark import preview_letters, read_letters, redrive_letters
from testbed.foreign_programs import acknowledge, create_or_update_consumer, pull

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HANDLER = {"durable_name": "unprocessed_order_handler", "backoff": [5_000_000_000], "max_deliver": 2}


async def acknowledge_entries(server: str, stream: str, count: int) -> list[int]:
    """Do what the orders document's handler does, and return the sequences of its jobs."""
    client = await nats.connect(server)
    try:
        await create_or_update_consumer(client, stream, HANDLER)
        jobs: list[int] = []
        async for message in pull(client, stream, str(HANDLER["durable_name"]), batch=count, expires=2):
            jobs.append(json.loads(message.data)["stream_seq"])
            await acknowledge(client, message)
        return jobs
    finally:
        await client.close()


async def report(server: str, name: str, jobs: list[int]) -> None:
    """Report jobs as handled."""
    client = await nats.connect(server)
    try:
        for job in jobs:
            await client.jetstream().publish(f"handled.{name}.{job}", b"{}")
    finally:
        await client.close()


@pytest.mark.parametrize("knows_us", ["acknowledges", "reports"])
def test_handled_letters_are_neither_read_nor_redriven(
    spark: SparkSession, connection_options: dict[str, str], name: str, knows_us: str
) -> None:
    letters: dict[str, Any] = {"name": f"{name}-dead"}
    if knows_us == "acknowledges":
        letters |= {"subjects": [f"{MAX_DELIVERIES}.{name}.*"], "retention": "workqueue", "deny_delete": True}
    queue = make_letters(connection_options, name, 6, dead_letters=letters)
    server, handled = connection_options["servers"], [1, 2, 3]
    if knows_us == "acknowledges":
        assert asyncio.run(acknowledge_entries(server, f"{name}-dead", 3)) == handled
    else:
        asyncio.run(report(server, name, handled))
    rows = read_letters(spark, queue, connection_options).select("sequence").collect()
    assert sorted(row.sequence for row in rows) == [4, 5, 6]
    frame = spark.range(1, 7).withColumnRenamed("id", "sequence")
    if knows_us == "acknowledges":
        # It could get an entry at any moment, and Spark's tasks claim none.
        with pytest.raises(RedriveRequestError, match=r"found .*-dead with its consumer unprocessed_order_handler"):
            redrive_letters(spark, frame, queue, None, connection_options)
        assert len(stored_messages(connection_options, name, f"{name}.jobs.>")) == 6
        preview = preview_letters(spark, frame, queue, None, connection_options)
        assert preview.redriven == 3
        return
    redriven = redrive_letters(spark, frame, queue, None, connection_options)
    assert (sorted(redriven.redriven), sorted(redriven.gone), redriven.failed) == ([4, 5, 6], handled, {})
    # The jobs of reports are removed.
    jobs = stored_messages(connection_options, name, f"{name}.jobs.>")
    assert sorted(int(message.data) for message in jobs) == [4, 5, 6]
