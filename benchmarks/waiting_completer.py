"""The process that ends jobs at a steady rate and reports when each end was stored.

It prints a line when it is ready, starts after a line on standard input, and prints for each job when it began to store
its end and when the server had confirmed that, by ``time.perf_counter``: on Linux that is one clock for all processes
of the machine.
"""

import argparse
import asyncio
import importlib
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime

import nats

from airflow_provider_jetstream.jetstream.advisories import Completion
from airflow_provider_jetstream.jetstream.contract import completion_subject
from benchmarks.waiting_methods import taskiq_backend

IN_FLIGHT = 200
CONSUMER = "worker"
# Shorter sleeps take longer than no sleep.
MIN_SLEEP = 0.002

StoreEnd = Callable[[int], Awaitable[None]]


async def completions(url: str, queue: str) -> StoreEnd:
    """Return a function that stores the completion of a job, as a worker does."""
    jetstream = (await nats.connect(url)).jetstream(timeout=30)

    async def store_end(sequence: int) -> None:
        completion = Completion(
            id=str(sequence),
            timestamp=datetime.now(UTC),
            stream=queue,
            consumer=CONSUMER,
            stream_seq=sequence,
            deliveries=1,
            job_id=f"job-{sequence}",
        )
        body = completion.model_dump_json(exclude_none=True).encode()
        await jetstream.publish(completion_subject(queue, CONSUMER, sequence), body)

    return store_end


async def results(url: str) -> StoreEnd:
    """Return a function that stores the result of a task, as a worker of taskiq does."""
    backend = await taskiq_backend(url)
    result = importlib.import_module("taskiq").TaskiqResult(is_err=False, return_value=None, execution_time=0.0)

    async def store_end(sequence: int) -> None:
        await backend.set_result(str(sequence), result)

    return store_end


async def run(store_end: StoreEnd, count: int, rate: float, limit: float) -> dict[str, list[float]]:
    """End ``count`` jobs at ``rate`` a second, until ``limit`` seconds have passed."""
    stored: dict[str, list[float]] = {}
    window = asyncio.Semaphore(IN_FLIGHT)

    async def end_job(sequence: int) -> None:
        async with window:
            sent = time.perf_counter()
            # An end that isn't stored is missing in the result.
            with suppress(nats.errors.Error, TimeoutError):
                await store_end(sequence)
                stored[str(sequence)] = [sent, time.perf_counter()]

    started = time.perf_counter()
    with suppress(TimeoutError):
        async with asyncio.timeout(limit), asyncio.TaskGroup() as group:
            for sequence in range(1, count + 1):
                wait_seconds = started + sequence / rate - time.perf_counter()
                if wait_seconds > MIN_SLEEP:
                    await asyncio.sleep(wait_seconds)
                group.create_task(end_job(sequence))
    return stored


async def main() -> None:
    """End jobs as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("completions", "results"))
    parser.add_argument("url")
    parser.add_argument("queue")
    parser.add_argument("count", type=int)
    parser.add_argument("rate", type=float)
    parser.add_argument("limit", type=float)
    options = parser.parse_args()
    store_end = await (
        completions(options.url, options.queue) if options.kind == "completions" else results(options.url)
    )
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    print(json.dumps(await run(store_end, options.count, options.rate, options.limit)))


if __name__ == "__main__":
    asyncio.run(main())
