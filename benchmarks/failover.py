"""How long publishing and working stand still when the server that leads a queue ends, in a cluster of three.

A publisher stores one job after the other, a worker does them, and the leader of the queue's stream is killed with
SIGKILL or stopped with SIGTERM. Measured are the longest pause between two stored jobs and between two finished ones. A
round counts only if each job was done.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import sys
import time
from collections import Counter
from itertools import count, pairwise

from airflow_provider_jetstream.jetstream import Job, connect, connection_settings, provision, publish
from airflow_provider_jetstream.jetstream.client.stream_api import consumer_info
from airflow_provider_jetstream.worker import Delivery, Worker
from testbed.nats_cluster import NatsCluster
from testbed.queues import CONSUMER, eventually, running_worker, small_queue
from testbed.text_table import text_table

_BEFORE = 1.0
_AFTER = 12.0
_PAUSE = 0.01


async def measure(cluster: NatsCluster, *, kill: bool) -> tuple[float, float, int]:
    """End the leader once; return the longest pause of storing and of working, and how many jobs ran twice.

    :param kill: whether the leader gets SIGKILL, in place of SIGTERM
    """
    settings = connection_settings({"servers": cluster.urls, "timeout": 5})
    queue = small_queue("failover", num_replicas=3, consumer={"ack_wait": "5s", "max_deliver": 5})
    stored: list[float] = []
    finished: list[float] = []
    runs: Counter[str] = Counter()

    async def handle(job: Delivery) -> None:
        runs[job.body.decode()] += 1
        finished.append(time.perf_counter())

    async with connect(settings) as connection:
        await provision(connection, queue)
        subject, ends = f"{queue.name}.jobs.a", time.perf_counter() + _BEFORE + _AFTER

        async def store() -> None:
            for number in count():
                await publish(connection, queue, [Job(str(number).encode(), id=f"job-{number}")], subject=subject)
                stored.append(time.perf_counter())
                if time.perf_counter() > ends:
                    return
                await asyncio.sleep(_PAUSE)

        async with running_worker(Worker(queue, CONSUMER, handle, settings, concurrency=10)):
            storing = asyncio.create_task(store())
            await asyncio.sleep(_BEFORE)
            leader = cluster.server(await asyncio.to_thread(cluster.leader, queue.name))
            await asyncio.to_thread(leader.kill if kill else leader.stop)
            await storing

            async def drained() -> bool:
                info = await consumer_info(connection, queue.name, CONSUMER)
                return not info["num_pending"] and not info["num_ack_pending"]

            await eventually(drained, within=60)
    if len(runs) != len(stored):
        raise RuntimeError(f"{len(stored)} jobs are stored and {len(runs)} were done")
    return _longest_pause(stored), _longest_pause(finished), sum(found > 1 for found in runs.values())


def _longest_pause(times: list[float]) -> float:
    return max(later - earlier for earlier, later in pairwise(sorted(times)))


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    rows = []
    for name, kill in (("SIGKILL", True), ("SIGTERM", False)):
        found = []
        for _ in range(options.rounds):
            with NatsCluster() as cluster:
                found.append(asyncio.run(measure(cluster, kill=kill)))
        for what, values in zip(("stored, s", "done, s", "jobs that ran twice"), zip(*found, strict=True), strict=True):
            figures = (statistics.median(values), min(values), max(values))
            rows.append((f"{name}, {what}", *(f"{figure:.3g}" for figure in figures)))
    print(text_table(("the longest time in which no job was", "median", "min", "max"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
