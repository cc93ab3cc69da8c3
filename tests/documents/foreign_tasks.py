"""The programs of the work queue pattern: the worker that fetches ten, publishers by partition and by time.

``foreign_tasks.py create worker``, ``… create worker-0 'tasks.0.>'`` and ``… bind worker`` work for
ever; ``create`` creates or updates the consumer first, as the pattern's worker does, ``bind`` uses the one that is
there. ``… poll`` takes jobs of ``TASKS_HIGH`` first, then of ``TASKS_NORMAL``.
"""

import asyncio
import os
import sys
from datetime import datetime

from nats.aio.client import Client
from nats.aio.msg import Msg

from testbed.foreign_programs import (
    acknowledge,
    attempt_of,
    connected,
    create_or_update_consumer,
    pull,
    record,
    sequence_of,
)

STREAM = "TASKS"
# The variable that says how long a task takes.
SECONDS = "TASK_SECONDS"
_BATCH = 10
# A body that fails at its first delivery, and one that fails for now.
_FAILS_ONCE = b"fails once"
_BUSY = b"busy"


def partition_of(key: str, partitions: int) -> int:
    """Return a key's partition: FNV-1a of 32 bits, modulo the number of partitions."""
    value = 0x811C9DC5
    for byte in key.encode():
        value = ((value ^ byte) * 0x01000193) % 2**32
    return value % partitions


async def publish_task(client: Client, task_type: str, body: bytes, partitions: int) -> None:
    """Publish a task to the partition of its type."""
    subject = f"tasks.{partition_of(task_type, partitions)}.{task_type}"
    await client.jetstream().publish(subject, body)


async def schedule_task(client: Client, subject: str, at: datetime, body: bytes) -> None:
    """Publish a task that isn't to run before a time."""
    headers = {"X-Execute-At": at.isoformat(timespec="seconds").replace("+00:00", "Z")}
    await client.jetstream().publish(subject, body, headers=headers)


async def work(consumer: str, *, stream: str = STREAM, create: bool = False, filter_subject: str | None = None) -> None:
    """Process tasks of one consumer, ten for each pull request; a task that fails is delivered again at once."""
    async with connected() as client:
        if create:
            config = {"durable_name": consumer} | ({"filter_subject": filter_subject} if filter_subject else {})
            await create_or_update_consumer(client, stream, config)
        while True:
            async for message in pull(client, stream, consumer, batch=_BATCH, expires=5):
                await process(client, consumer, message)


async def poll(high: str = "TASKS_HIGH", normal: str = "TASKS_NORMAL", consumer: str = "worker") -> None:
    """Take tasks of high priority for as long as there are any, then up to ten normal ones."""
    async with connected() as client:
        while True:
            if not await _process_batch(client, high, consumer, 0.1):
                await _process_batch(client, normal, consumer, 1.0)


async def _process_batch(client: Client, stream: str, consumer: str, expires: float) -> int:
    count = 0
    async for message in pull(client, stream, consumer, batch=_BATCH, expires=expires):
        await process(client, stream, message)
        count += 1
    return count


async def process(client: Client, worker: str, message: Msg) -> None:
    """Process one task, and acknowledge it or ask for it again."""
    if message.data == _BUSY and attempt_of(message) == 1:
        await acknowledge(client, message, b'-NAK {"delay": 1000000000}')
    elif message.data == _FAILS_ONCE and attempt_of(message) == 1:
        await acknowledge(client, message, b"-NAK")
    else:
        record(worker=worker, task=message.data.decode(), sequence=sequence_of(message), subject=message.subject)
        await asyncio.sleep(float(os.environ.get(SECONDS, "0.01")))
        await acknowledge(client, message)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["create", consumer, *filters]:
            asyncio.run(work(consumer, create=True, filter_subject=next(iter(filters), None)))
        case ["bind", consumer]:
            asyncio.run(work(consumer))
        case ["poll"]:
            asyncio.run(poll())
        case _:
            sys.exit(__doc__)
