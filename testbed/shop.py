"""A queue whose workers fail until they are mended: its dead letters, and what becomes of them."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
from airflow_provider_jetstream.jetstream.dead_letters.find import summarise_dead_letters
from airflow_provider_jetstream.worker import Delivery, Worker
from testbed.queues import eventually, running_worker

_AT_ONCE = 500


@dataclass
class Shop:
    """Workers whose handler fails as it is set, and what they have done.

    :param fails: returns the error of a job, if it fails
    :param is_open: while it isn't set, jobs are begun and don't end
    """

    fails: Callable[[int], str] = lambda _: "no currency"
    done: Counter[int] = field(default_factory=Counter)
    is_open: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.is_open.set()

    async def handle(self, job: Delivery) -> None:
        """Do a job, or fail."""
        await self.is_open.wait()
        number = int(job.body)
        if error := self.fails(number):
            raise ValueError(error)
        self.done[number] += 1


@asynccontextmanager
async def shop_with_letters(
    connection: NatsPyConnection, settings: ConnectionSettings, queue: WorkQueue, count: int, within: float = 60.0
) -> AsyncIterator[Shop]:
    """Have a worker make dead letters of jobs 0, 1, …, and go on taking jobs until the block ends."""
    shop = Shop()
    jetstream = connection.client.jetstream(timeout=30)
    subject = queue.subjects[0].replace(">", "a")
    for start in range(0, count, _AT_ONCE):
        numbers = range(start, min(count, start + _AT_ONCE))
        await asyncio.gather(*(jetstream.publish(subject, str(number).encode()) for number in numbers))
    worker = Worker(queue, queue.consumers[0].name, shop.handle, settings, concurrency=50, grace=5)
    async with running_worker(worker):

        async def all_dead() -> bool:
            return (await summarise_dead_letters(connection, queue)).dead == count

        await eventually(all_dead, within)
        try:
            yield shop
        finally:
            shop.is_open.set()
