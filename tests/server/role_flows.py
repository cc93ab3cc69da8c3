"""What roles do that no face does alone: the page's faster reads and its samples, and a report's driver and task."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream import Selection, discover_queue
from airflow_provider_jetstream.jetstream.errors import ApiError
from airflow_provider_jetstream.jetstream.inspection.samples import SampleStream
from airflow_provider_jetstream.spark.dead_letters.read import ClassifyTask
from airflow_provider_jetstream.spark.dead_letters.scanned_jobs import ScannedJobs
from testbed.face import Scan
from testbed.spark_face import BlockingConnection, run_on_own_connection

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream import Connection, WorkQueue

__all__ = ["count_letters_as_spark", "take_samples"]


async def take_samples(connection: Connection, admin: Connection) -> None:
    """Store a sample of the queues as the page does, and read it."""
    with suppress(ApiError):
        await admin.api("STREAM.DELETE.airflow_monitor")
    stream = SampleStream(connection)
    assert await stream.last() is None
    await stream.make()
    assert await stream.append("a test", {}, 0)
    assert [sample.holder async for sample in stream.read(1)] == ["a test"]


async def count_letters_as_spark(options: Mapping[str, str], queue: WorkQueue) -> int:
    """Do what the driver of a report does, and then what a task does, without Spark between them."""

    async def scan_all(connection: BlockingConnection) -> tuple[ScannedJobs, Scan]:
        await connection.discover_capabilities((queue.name, *queue.companion_names()))
        scan = await Scan.begin(connection, await discover_queue(connection, queue.name))
        return await ScannedJobs.of_scan(scan, Selection()), scan

    jobs, scan = await asyncio.to_thread(run_on_own_connection, options, scan_all)
    task = ClassifyTask(dict(options), scan.context, frozenset(), Selection(), lost=True)
    letters = await asyncio.to_thread(lambda: list(task.classify(jobs.index, jobs.without_entry)))
    return sum(batch.num_rows for batch in letters)
