"""One way of doing the jobs of a queue, in a process of its own: prints seconds, CPU seconds and counts as JSON."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

from nats.aio.msg import Msg

from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
from airflow_provider_jetstream.jetstream.client.settings import connection_settings
from airflow_provider_jetstream.jetstream.client.stream_api import consumer_info
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.worker.delivery import Delivery
from airflow_provider_jetstream.worker.worker import Worker
from benchmarks.dead_queue import open_connection

CONSUMER = "worker"
_PAUSE = 0.002


class _Clock:
    """Measures from the first job to the last acknowledgement."""

    def __init__(self, jobs: int) -> None:
        self.left = jobs
        self.began = self.cpu = 0.0
        self.all_handled = asyncio.Event()

    def handle(self, count: int = 1) -> None:
        if not self.began:
            self.began, self.cpu = time.perf_counter(), _cpu()
        self.left -= count
        if self.left <= 0:
            self.all_handled.set()

    def figures(self) -> dict[str, float]:
        return {"seconds": time.perf_counter() - self.began, "cpu": _cpu() - self.cpu}


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def run_worker(
    url: str, queue: WorkQueue, jobs: int, slots: int, seconds: float = 0.0, *, plain: bool = False
) -> dict[str, float]:
    """Run this package's worker with a handler that does nothing, or sleeps."""
    clock = _Clock(jobs)

    async def handle(_: Delivery) -> None:
        clock.handle()
        if seconds:
            await asyncio.sleep(seconds)

    def handle_in_a_thread(_: Delivery) -> None:
        clock.handle()

    worker = Worker(
        queue, CONSUMER, handle_in_a_thread if plain else handle, connection_settings({"servers": (url,)}), concurrency=slots
    )
    return await _measure(url, queue, worker, clock)


async def _measure(url: str, queue: WorkQueue, worker: Worker, clock: _Clock) -> dict[str, float]:
    async with open_connection(url) as connection:
        running = asyncio.create_task(worker.run())
        await clock.all_handled.wait()
        # The handler sees the last job before its completion is stored.
        while await _is_busy(connection, queue):
            await asyncio.sleep(_PAUSE)
        figures = clock.figures()
        worker.stop()
        await running
    return figures


async def _is_busy(connection: NatsPyConnection, queue: WorkQueue) -> bool:
    info = await consumer_info(connection, queue.name, CONSUMER)
    return bool(info["num_pending"] or info["num_ack_pending"])


async def loop_of_nats_py(url: str, queue: WorkQueue, jobs: int, slots: int) -> dict[str, float]:
    """Fetch as many jobs as there are slots, and store completions and confirm acknowledgements concurrently."""
    clock = _Clock(jobs)
    async with open_connection(url) as connection:
        jetstream = connection.client.jetstream(timeout=30)

        async def do(message: Msg) -> None:
            clock.handle()
            if queue.events:
                sequence = message.metadata.sequence.stream
                event = {"id": str(sequence), "stream": queue.name, "consumer": CONSUMER, "stream_seq": sequence}
                identity = f"done:{queue.name}:{sequence}:{message.metadata.timestamp.timestamp()}"
                subject = f"completed.{queue.name}.{CONSUMER}.{sequence}"
                await jetstream.publish(subject, json.dumps(event).encode(), headers={"Nats-Msg-Id": identity})
            await message.ack_sync(timeout=30)

        pull = await jetstream.pull_subscribe_bind(CONSUMER, stream=queue.name)
        while clock.left > 0:
            await asyncio.gather(*(do(message) for message in await pull.fetch(slots, timeout=5)))
        return clock.figures()


Way = Callable[[str, WorkQueue, int], Coroutine[Any, Any, dict[str, float]]]


def way(name: str) -> Way:
    """Return a way by its name, such as ``worker:100``, ``sleep:100``, ``thread:100``, ``batch:100`` or ``nats-py:100``."""
    kind, _, slots = name.partition(":")
    count = int(slots)
    ways: dict[str, Way] = {
        "worker": lambda url, queue, jobs: run_worker(url, queue, jobs, count),
        "sleep": lambda url, queue, jobs: run_worker(url, queue, jobs, count, 0.005),
        "thread": lambda url, queue, jobs: run_worker(url, queue, jobs, count, plain=True),
        "nats-py": lambda url, queue, jobs: loop_of_nats_py(url, queue, jobs, count),
    }
    return ways[kind]


def main() -> None:
    """Measure the way that the arguments name: URL, way, jobs, and the queue's declaration."""
    url, name, jobs, declaration = sys.argv[1:]
    values: dict[str, Any] = json.loads(declaration)
    print(json.dumps(asyncio.run(way(name)(url, WorkQueue(**values), int(jobs)))))


if __name__ == "__main__":
    main()
