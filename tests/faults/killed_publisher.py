"""A program that publishes a task's jobs, in another order at each try, and is killed while it does.

Arguments: the server's address, the queue, how many jobs, the number of the try, and whether it is to be killed.
"""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream import Job, Origin, connect, connection_settings, discover_queue, publish

if TYPE_CHECKING:
    from collections.abc import Iterator


def jobs(count: int, attempt: int) -> Iterator[object]:
    """Return jobs in the order of one try: a third has ids, and of the others some are equal."""
    numbers = list(range(count))
    random.Random(attempt).shuffle(numbers)  # noqa: S311
    for number in numbers:
        body = f"equal {number // 30}" if number % 3 == 0 else f"job {number}"
        yield Job(body, id=f"id-{number}") if number % 3 == 1 else body


def _without_end(items: Iterator[object]) -> Iterator[object]:
    """Return items whose source blocks after the last, so that whoever is to be killed doesn't end before."""
    yield from items
    threading.Event().wait()


async def _publish(url: str, name: str, count: int, attempt: int, *, is_killed: bool) -> None:
    async with connect(connection_settings({"servers": (url,), "timeout": 10})) as connection:
        queue = await discover_queue(connection, name)
        origin = Origin("dag", "run", "task", max_tries=10)
        items = _without_end(jobs(count, attempt)) if is_killed else jobs(count, attempt)
        report = await publish(connection, queue, items, subject=f"{name}.jobs.a", origin=origin)
        sys.stdout.write(f"{report.stored} {report.duplicates}\n")


if __name__ == "__main__":
    _url, _name, _count, _attempt, _end = sys.argv[1:]
    asyncio.run(_publish(_url, _name, int(_count), int(_attempt), is_killed=_end == "killed"))
