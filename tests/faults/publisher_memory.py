"""A program that publishes many jobs from a generator as a task does, and prints how much memory that took.

Arguments: the server's address, the queue, and how many jobs.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys

from airflow_provider_jetstream.jetstream import Origin, connect, connection_settings, discover_queue, publish


def peak_mebibytes() -> float:
    """Return the largest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def _publish(url: str, name: str, count: int) -> None:
    async with connect(connection_settings({"servers": (url,), "timeout": 10})) as connection:
        queue = await discover_queue(connection, name)
        before = peak_mebibytes()
        for _ in range(2):
            # The second time as a retry that finds all of them stored.
            jobs = ({"number": number, "padding": "x" * 200} for number in range(count))
            origin = Origin("dag", "run", "task", max_tries=1)
            report = await publish(connection, queue, jobs, subject=f"{name}.jobs.a", origin=origin)
            figures = {"stored": report.stored, "duplicates": report.duplicates, "grown": peak_mebibytes() - before}
            sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    asyncio.run(_publish(sys.argv[1], sys.argv[2], int(sys.argv[3])))
