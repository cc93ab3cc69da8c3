"""One way of doing the jobs of a queue, in a process of its own: prints seconds, CPU seconds and counts as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import nats

from airflow_provider_jetstream.jetstream.client.settings import connection_settings
from airflow_provider_jetstream.jetstream.client.stream_api import consumer_info
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.waiting.cursor import take_cursor
from airflow_provider_jetstream.jetstream.waiting.handle import JobsHandle
from airflow_provider_jetstream.worker.worker import Worker
from benchmarks.dead_queue import open_connection
from testbed.queues import stored_nanoseconds

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext

    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
    from airflow_provider_jetstream.worker.delivery import Delivery

CONSUMER = "worker"
_PAUSE = 0.002
_BETWEEN = 0.005
# Seconds that a job takes in the way that waits.
SLEEP = 0.005
# How many jobs a batch handler gets at a time.
BATCH = 100


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
    url: str, queue: WorkQueue, jobs: int, slots: int, seconds: float = 0.0, *, threads: bool = False
) -> dict[str, float]:
    """Run this package's worker with a handler that does nothing, or sleeps."""
    clock = _Clock(jobs)

    async def handle(_: Delivery) -> None:
        clock.handle()
        if seconds:
            await asyncio.sleep(seconds)

    def handle_in_a_thread(_: Delivery) -> None:
        clock.handle()

    handler = handle_in_a_thread if threads else handle
    worker = Worker(queue, CONSUMER, handler, connection_settings({"servers": (url,)}), concurrency=slots)
    return await _measure(url, queue, worker, clock)


async def sleep_alone(_: str, __: WorkQueue, jobs: int, slots: int) -> dict[str, float]:
    """Sleep in as many tasks as there are slots, as often as there are jobs: what the handlers alone could do."""
    clock = _Clock(jobs)

    async def sleep(times: int) -> None:
        for _ in range(times):
            clock.handle()
            await asyncio.sleep(SLEEP)

    await asyncio.gather(*(sleep(jobs // slots) for _ in range(slots)))
    return clock.figures()


async def run_batches(url: str, queue: WorkQueue, jobs: int, slots: int) -> dict[str, float]:
    """Run this package's worker with a batch handler that does nothing.

    :param slots: how many jobs the handlers have at a time, in calls of :data:`BATCH`
    """
    clock = _Clock(jobs)

    async def handle(deliveries: list[Delivery]) -> None:
        clock.handle(len(deliveries))

    worker = Worker(
        queue, CONSUMER, handle, connection_settings({"servers": (url,)}), concurrency=slots // BATCH, batch=BATCH
    )
    return await _measure(url, queue, worker, clock)


async def light_load(url: str, queue: WorkQueue, jobs: int, slots: int) -> dict[str, float]:
    """Publish one job after another, each a while after the last one, and measure from publishing to the handler."""
    latencies: list[float] = []
    arrived = asyncio.Event()
    began = 0.0

    async def handle(_: Delivery) -> None:
        latencies.append(time.perf_counter() - began)
        arrived.set()

    clock = _Clock(jobs)
    async with open_connection(url) as connection:
        worker = Worker(queue, CONSUMER, handle, connection_settings({"servers": (url,)}), concurrency=slots)
        running = asyncio.create_task(worker.run())
        while not (await consumer_info(connection, queue.name, CONSUMER))["num_waiting"]:  # noqa: ASYNC110
            await asyncio.sleep(_PAUSE)
        clock.handle(0)
        for _ in range(jobs):
            arrived.clear()
            began = time.perf_counter()
            await connection.publish(f"{queue.name}.jobs", b"x" * 200)
            await arrived.wait()
            await asyncio.sleep(_BETWEEN)
        figures = clock.figures()
        worker.stop()
        await running
    return figures | _quantiles(latencies)


async def _measure(url: str, queue: WorkQueue, worker: Worker, clock: _Clock) -> dict[str, float]:
    async with open_connection(url) as connection:
        running = asyncio.create_task(worker.run())
        await clock.all_handled.wait()
        # The handler sees the last job before its completion is stored.
        while await _is_busy(connection, queue):  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(_PAUSE)
        figures = clock.figures()
        worker.stop()
        await running
    return figures


async def _is_busy(connection: NatsPyConnection, queue: WorkQueue) -> bool:
    info = await consumer_info(connection, queue.name, CONSUMER)
    return bool(info["num_pending"] or info["num_ack_pending"])


async def loop_of_nats_py(url: str, queue: WorkQueue, jobs: int, slots: int) -> dict[str, float]:
    """Fetch as many jobs as there are slots, and store completions and confirm acknowledgements concurrently.

    With a client of nats-py's own: that of this package parses and writes faster.
    """
    clock = _Clock(jobs)
    async with await nats.connect(url) as client:
        jetstream = client.jetstream(timeout=30)

        async def do(message: Msg) -> None:
            clock.handle()
            if queue.events:
                await _store_completion(jetstream, queue, message)
            await message.ack_sync(timeout=30)

        pull = await jetstream.pull_subscribe_bind(CONSUMER, stream=queue.name)
        while clock.left > 0:
            await asyncio.gather(*(do(message) for message in await pull.fetch(slots, timeout=5)))
        return clock.figures()


async def loop_of_the_docs(url: str, queue: WorkQueue, jobs: int, slots: int) -> dict[str, float]:
    """Do what nats-py's documentation does: fetch some, and then one job after another."""
    clock = _Clock(jobs)
    async with await nats.connect(url) as client:
        jetstream = client.jetstream(timeout=30)
        pull = await jetstream.pull_subscribe_bind(CONSUMER, stream=queue.name)
        while clock.left > 0:
            for message in await pull.fetch(slots, timeout=5):
                clock.handle()
                if queue.events:
                    await _store_completion(jetstream, queue, message)
                await message.ack_sync(timeout=30)
        return clock.figures()


async def _store_completion(jetstream: JetStreamContext, queue: WorkQueue, message: Msg) -> None:
    sequence = message.metadata.sequence.stream
    event = {"id": str(sequence), "stream": queue.name, "consumer": CONSUMER, "stream_seq": sequence}
    identity = f"done:{queue.name}:{sequence}:{stored_nanoseconds(message)}"
    subject = f"completed.{queue.name}.{CONSUMER}.{sequence}"
    await jetstream.publish(subject, json.dumps(event).encode(), headers={"Nats-Msg-Id": identity})


async def ends(url: str, queue: WorkQueue, jobs: int, slots: int) -> dict[str, float]:
    """Let a trigger wait for each of some jobs, one after another, and measure from the handler's end to its event."""
    address = urlsplit(url)
    connection_of_airflow = {"conn_type": "nats", "host": address.hostname, "port": address.port}
    os.environ["AIRFLOW_CONN_NATS_DEFAULT"] = json.dumps(connection_of_airflow)
    with tempfile.TemporaryDirectory() as home:
        os.environ["AIRFLOW_HOME"] = home
        return await _measure_ends(url, queue, jobs, slots)


async def _measure_ends(url: str, queue: WorkQueue, jobs: int, slots: int) -> dict[str, float]:
    from airflow_provider_jetstream.triggers.completion import JobCompletionTrigger

    latencies: list[float] = []
    go, ended_at, hour = asyncio.Event(), 0.0, 3_600.0

    async def handle(_: Delivery) -> None:
        nonlocal ended_at
        await go.wait()
        ended_at = time.perf_counter()

    async def event_of(sequence: int, cursor: Cursor) -> None:
        trigger = JobCompletionTrigger(
            nats_conn_id="nats_default",
            handle=JobsHandle(cursor=cursor, sequences=[(sequence, sequence)]),
            tolerance={},
            deadline=time.time() + hour,
            # In the past, so that no event is delayed by the guard against early events.
            deferred_at=time.time() - hour,
            summary={},
        )
        await anext(aiter(trigger.run()))
        latencies.append(time.perf_counter() - ended_at)

    clock = _Clock(jobs)
    async with open_connection(url) as connection:
        worker = Worker(queue, CONSUMER, handle, connection_settings({"servers": (url,)}), concurrency=slots)
        running = asyncio.create_task(worker.run())
        jetstream = connection.client.jetstream(timeout=30)
        # As in a triggerer, other tasks wait for jobs of the queue all the while.
        other = asyncio.create_task(event_of(10**9, await take_cursor(connection, queue)))
        clock.handle(0)
        for _ in range(jobs):
            go.clear()
            cursor = await take_cursor(connection, queue)
            stored = await jetstream.publish(f"{queue.name}.jobs", b"x" * 200)
            waiting = asyncio.create_task(event_of(stored.seq, cursor))
            await asyncio.sleep(_BETWEEN * 4)
            go.set()
            await waiting
        figures = clock.figures()
        other.cancel()
        worker.stop()
        await asyncio.gather(running, other, return_exceptions=True)
    return figures | _quantiles(latencies)


def _quantiles(latencies: list[float]) -> dict[str, float]:
    ordered = sorted(latencies)
    return {"p50 ms": ordered[len(ordered) // 2] * 1e3, "p99 ms": ordered[len(ordered) * 99 // 100] * 1e3}


Run = Callable[[str, WorkQueue, int, int], Coroutine[Any, Any, dict[str, float]]]

RUNS: dict[str, Run] = {
    "worker": run_worker,
    "sleep": lambda url, queue, jobs, slots: run_worker(url, queue, jobs, slots, SLEEP),
    "sleep alone": sleep_alone,
    "threads": lambda url, queue, jobs, slots: run_worker(url, queue, jobs, slots, threads=True),
    "batch": run_batches,
    "light": light_load,
    "ends": ends,
    "nats-py": loop_of_nats_py,
    "docs": loop_of_the_docs,
}


def main() -> None:
    """Measure what the arguments name: URL, kind and slots, number of jobs, and the queue's declaration."""
    url, kind, slots, jobs, declaration = sys.argv[1:]
    queue = WorkQueue(**json.loads(declaration))
    print(json.dumps(asyncio.run(RUNS[kind](url, queue, int(jobs), int(slots)))))


if __name__ == "__main__":
    main()
