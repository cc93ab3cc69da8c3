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
import statistics
import sys
import time

from airflow_provider_jetstream.jetstream.dead_letters.find import summarise_dead_letters
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from benchmarks.dead_queue import measure_apart, open_connection, peak_memory, prepare
from testbed.nats_server import NatsServer
from testbed.text_table import text_table

BODY = b"x" * 64
LOOKS = ("scan", "first summary", "second summary")


async def measure(url: str, look: str, declaration: str) -> dict[str, float]:
    """Scan in this process; return letters, seconds, requests and peak memory in MiB."""
    queue = WorkQueue(**json.loads(declaration))
    async with open_connection(url) as connection:
        sent, started = connection.client.stats["out_msgs"], time.perf_counter()
        if look == "scan":
            scan = await Scan.begin(connection, queue)
            letters = sum([len(page.letters) async for page in scan.pages(Selection())])
        else:
            letters = (await summarise_dead_letters(connection, queue)).dead
        seconds = time.perf_counter() - started
        requests = connection.client.stats["out_msgs"] - sent
    return {"letters": letters, "seconds": seconds, "requests": requests, "peak": peak_memory()}


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
                queue = asyncio.run(prepare(server.url, "scanned", letters, BODY, events="scanned-events"))
                for look in options.looks:
                    measured = measure_apart("benchmarks.scan", server.url, look, queue)
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
