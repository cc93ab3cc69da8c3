"""The process that ends jobs at a steady rate and tells when each end was stored.

It says when it is ready, begins when it is told to, and prints for each job when it began to store its end and when the
server had confirmed that, by ``time.perf_counter``: on Linux that is one clock for all processes of the machine.
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
# Shorter sleeps than this are slower than none.
SHORTEST = 0.002

End = Callable[[int], Awaitable[None]]


async def completions(url: str, queue: str) -> End:
    """
    Give what stores the completion of a job, as a worker does.

    :param url: the server
    :param queue: the queue's name
    """
    jetstream = (await nats.connect(url)).jetstream(timeout=30)

    async def end(sequence: int) -> None:
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

    return end


async def results(url: str) -> End:
    """
    Give what stores the result of a task, as a worker of taskiq does.

    :param url: the server
    """
    backend = await taskiq_backend(url)
    result = importlib.import_module("taskiq").TaskiqResult(is_err=False, return_value=None, execution_time=0.0)

    async def end(sequence: int) -> None:
        await backend.set_result(str(sequence), result)

    return end


async def run(end: End, count: int, rate: float, limit: float) -> dict[str, list[float]]:
    """
    End the jobs.

    :param end: ends one
    :param count: how many
    :param rate: how many a second
    :param limit: seconds until no more is tried
    """
    stored: dict[str, list[float]] = {}
    window = asyncio.Semaphore(IN_FLIGHT)

    async def one(sequence: int) -> None:
        async with window:
            sent = time.perf_counter()
            # What isn't stored is missing in the answer.
            with suppress(nats.errors.Error, TimeoutError):
                await end(sequence)
                stored[str(sequence)] = [sent, time.perf_counter()]

    started = time.perf_counter()
    with suppress(TimeoutError):
        async with asyncio.timeout(limit), asyncio.TaskGroup() as group:
            for sequence in range(1, count + 1):
                ahead = started + sequence / rate - time.perf_counter()
                if ahead > SHORTEST:
                    await asyncio.sleep(ahead)
                group.create_task(one(sequence))
    return stored


async def main() -> None:
    """End jobs as asked on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("completions", "results"))
    parser.add_argument("url")
    parser.add_argument("queue")
    parser.add_argument("count", type=int)
    parser.add_argument("rate", type=float)
    parser.add_argument("limit", type=float)
    asked = parser.parse_args()
    end = await (completions(asked.url, asked.queue) if asked.kind == "completions" else results(asked.url))
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    print(json.dumps(await run(end, asked.count, asked.rate, asked.limit)))


if __name__ == "__main__":
    asyncio.run(main())
