"""The cost of a scan per letter: requests, letters a second and peak memory, for queues of very different sizes.

Every size gets a queue with all companions on a server of its own: jobs of 64 bytes, dead by one delivery, their
advisories captured. The scan runs in a process of its own, whose peak memory is measured, and a round counts only if
every letter was found. Requests are what the client has sent. A first look copies each body into the dead letter queue,
which the second one needn't do any more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

from airflow_provider_jetstream.jetstream.client.advisory_probe import probe_consumer
from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.settings import connection_settings
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.dead_letters.find import summarise_dead_letters
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from testbed.nats_server import NatsServer
from testbed.text_table import text_table

BODY = b"x" * 64
IN_FLIGHT = 2_000
MEBIBYTE = 2**20
LOOKS = ("scan", "first summary", "second summary")


async def prepare(url: str, letters: int) -> WorkQueue:
    """Make a queue whose jobs are all dead letters."""
    declaration: dict[str, Any] = {
        "name": "scanned",
        "subjects": ["scanned.jobs"],
        "consumers": [{"name": "worker", "max_deliver": 1, "ack_wait": "1s", "max_ack_pending": -1}],
        "dead_letters": "scanned-dead",
        "events": "scanned-events",
    }
    queue = WorkQueue(**declaration)
    async with connect(connection_settings({"servers": (url,), "timeout": 60})) as connection:
        await provision(connection, queue)
        jetstream = connection.client.jetstream(timeout=60)
        for start in range(0, letters, IN_FLIGHT):
            count = min(IN_FLIGHT, letters - start)
            await asyncio.gather(*(jetstream.publish("scanned.jobs", BODY) for _ in range(count)))
        worker = await jetstream.pull_subscribe_bind("worker", stream="scanned")
        left = letters
        while left:
            left -= len(await worker.fetch(min(left, IN_FLIGHT), timeout=60))
        while (await stream_info(connection, "scanned-dead"))["state"]["messages"] < letters:
            await probe_consumer(connection, "scanned", "worker")
            await asyncio.sleep(0.5)
    return queue


async def measure(url: str, look: str, declaration: str) -> dict[str, float]:
    """Scan in this process; return letters, seconds, requests and peak memory in MiB."""
    queue = WorkQueue(**json.loads(declaration))
    async with connect(connection_settings({"servers": (url,), "timeout": 60})) as connection:
        sent, started = connection.client.stats["out_msgs"], time.perf_counter()
        if look == "scan":
            scan = await Scan.begin(connection, queue)
            letters = sum([len(page.letters) async for page in scan.pages(Selection())])
        else:
            letters = (await summarise_dead_letters(connection, queue)).dead
        seconds = time.perf_counter() - started
        requests = connection.client.stats["out_msgs"] - sent
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MEBIBYTE
    return {"letters": letters, "seconds": seconds, "requests": requests, "peak": peak}


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--letters", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--looks", nargs="+", default=list(LOOKS), choices=LOOKS)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(asyncio.run(measure(*options.measure))))
        return 0
    results: dict[tuple[int, str], list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for letters in options.letters:
            with NatsServer() as server:
                queue = asyncio.run(prepare(server.url, letters))
                declaration = json.dumps(queue.model_dump(mode="json", exclude_unset=True))
                for look in options.looks:
                    command = [sys.executable, "-m", "benchmarks.scan", "--measure", server.url, look, declaration]
                    ended = subprocess.run(command, check=True, capture_output=True, text=True)
                    measured = json.loads(ended.stdout)
                    if measured["letters"] != letters:
                        raise SystemExit(f"{look}: found {measured['letters']} of {letters} letters")
                    results.setdefault((letters, look), []).append(measured)
    rows = [
        (
            f"{letters:,}",
            look,
            f"{statistics.median(measured['requests'] / letters for measured in rounds):.3f}",
            f"{statistics.median(letters / measured['seconds'] for measured in rounds):,.0f}",
            f"{statistics.median(measured['peak'] for measured in rounds):.0f}",
        )
        for (letters, look), rounds in results.items()
    ]
    print(text_table(("letters", "look", "requests/letter", "letters/s", "peak MiB"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
