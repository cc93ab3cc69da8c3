"""A worker whose process is killed in place of any of its calls to the server, such as one that stores an error."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from unittest.mock import patch

from airflow_provider_jetstream.jetstream import connection_settings
from airflow_provider_jetstream.worker import Worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from airflow_provider_jetstream.jetstream import Connection, WorkQueue
    from airflow_provider_jetstream.worker import Delivery


def half(job: Delivery) -> None:
    """Say that half of the job is done; fail at the first attempt."""
    job.progress(0.5, f"half of attempt {job.attempt}")
    if job.attempt == 1:
        raise ValueError("at attempt 1")


async def work_twice(connection: Connection, queue: WorkQueue) -> None:
    """Work on two deliveries over a connection that is open."""

    async def handle(job: Delivery) -> None:
        if job.attempt > 1:
            worker.stop()
        half(job)

    @asynccontextmanager
    async def connect(*_: object) -> AsyncIterator[Connection]:
        yield connection

    settings = connection_settings({"servers": ("nats://of-the-connection:4222",)})
    with patch("airflow_provider_jetstream.jetstream.client.connect.connect", connect):
        worker = Worker(queue, "worker", handle, settings, name="first")
        await worker.run()
