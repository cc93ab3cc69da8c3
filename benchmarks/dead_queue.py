"""A queue whose jobs are all dead letters, and figures of a program that runs in a process of its own."""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.advisory_probe import probe_consumer
from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.settings import connection_settings
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection

_IN_FLIGHT = 2_000
_MEBIBYTE = 2**20


def open_connection(url: str) -> AbstractAsyncContextManager[NatsPyConnection]:
    """Connect, with time for a server that is busy."""
    return connect(connection_settings({"servers": (url,), "timeout": 60}))


async def prepare(url: str, name: str, letters: int, body: bytes, **declared: Any) -> WorkQueue:
    """Make a queue whose jobs are dead by one delivery, their advisories captured.

    :param declared: more fields of the declaration
    """
    declaration: dict[str, Any] = {
        "name": name,
        "subjects": [f"{name}.jobs"],
        "consumers": [{"name": "worker", "max_deliver": 1, "ack_wait": "1s", "max_ack_pending": -1}],
        "dead_letters": f"{name}-dead",
    }
    queue = WorkQueue(**declaration, **declared)
    async with open_connection(url) as connection:
        await provision(connection, queue)
        jetstream = connection.client.jetstream(timeout=60)
        for start in range(0, letters, _IN_FLIGHT):
            count = min(_IN_FLIGHT, letters - start)
            await asyncio.gather(*(jetstream.publish(f"{name}.jobs", body) for _ in range(count)))
        worker = await jetstream.pull_subscribe_bind("worker", stream=name)
        left = letters
        while left:
            for message in await worker.fetch(min(left, _IN_FLIGHT), timeout=60):
                left -= 1
                await message.nak()
        while (await stream_info(connection, f"{name}-dead"))["state"]["messages"] < letters:
            await probe_consumer(connection, name, "worker")
            await asyncio.sleep(0.1)
    return queue


def measure_apart(module: str, url: str, variant: str, queue: WorkQueue) -> dict[str, float]:
    """Run ``python -m module --measure`` with the arguments that follow, and return the figures that it prints."""
    declaration = json.dumps(queue.model_dump(mode="json", exclude_unset=True))
    command = [sys.executable, "-m", module, "--measure", url, variant, declaration]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: dict[str, float] = json.loads(ended.stdout)
    return figures


def peak_memory() -> float:
    """Return the highest memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _MEBIBYTE
