"""What the tests of the page have servers do."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.dead_letters.find import summarise_dead_letters
from airflow_provider_jetstream.worker import Delivery, Worker
from example_workers.store import process
from testbed.queues import eventually, make_queue, publish_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

ROOT = Path(__file__).resolve().parents[2]
STORE = ROOT / "example_dags" / "queues" / "store.yaml"

_Found = TypeVar("_Found")


def blocking(work: Coroutine[Any, Any, _Found]) -> _Found:
    """Run a coroutine; Playwright has the loop of this thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


async def letters_of(settings: ConnectionSettings, queue: WorkQueue, count: int) -> None:
    """Wait until a queue has so many dead letters."""
    async with connect(settings) as connection:

        async def died() -> bool:
            return (await summarise_dead_letters(connection, queue)).dead == count

        await eventually(died, within=120)


async def do(_: Delivery) -> None:
    """Do a job; a few dozen a second."""
    await asyncio.sleep(0.02)


@contextmanager
def working(settings: ConnectionSettings, queue: WorkQueue, handler: Callable[..., object] = do) -> Iterator[None]:
    """Have a worker do the jobs of a queue."""
    started: list[tuple[asyncio.AbstractEventLoop, Worker]] = []

    async def run() -> None:
        worker = Worker(queue, queue.consumers[0].name, handler, settings)
        started.append((asyncio.get_running_loop(), worker))
        await worker.run()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(asyncio.run, run())
        try:
            yield
        finally:
            loop, worker = started[0]
            loop.call_soon_threadsafe(worker.stop)
            running.result(20)


async def with_connection(settings: ConnectionSettings, work: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an async function with an open connection before its other arguments."""
    async with connect(settings) as connection:
        return await work(connection, *args, **kwargs)


@contextmanager
def unlucky(settings: ConnectionSettings, name: str) -> Iterator[None]:
    """Make a queue of whose jobs four died of a busy bank and two of their form; keep its worker."""
    busy = [json.dumps({"id": f"{name}-{number}", "amount": 1, "bank": "slow"}) for number in range(4)]
    malformed = [json.dumps({"id": f"{name}-{number}", "amount": "1,5", "bank": "fast"}) for number in (4, 5)]
    queue = blocking(with_connection(settings, make_queue, name))
    blocking(with_connection(settings, publish_jobs, queue, [*busy, *malformed]))
    with working(settings, queue, process):
        blocking(letters_of(settings, queue, 6))
        yield
