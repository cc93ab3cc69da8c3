"""Steps of the page's tests: queues, dead letters and workers on a server."""

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

_Result = TypeVar("_Result")


def blocking(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine in another thread, since Playwright occupies the event loop of this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


async def wait_for_letters(settings: ConnectionSettings, queue: WorkQueue, count: int) -> None:
    """Wait until a queue has so many dead letters."""
    async with connect(settings) as connection:

        async def all_dead() -> bool:
            return (await summarise_dead_letters(connection, queue)).dead == count

        await eventually(all_dead, within=120)


async def complete(_: Delivery) -> None:
    """Complete a job; a few dozen a second."""
    await asyncio.sleep(0.02)


@contextmanager
def working(
    settings: ConnectionSettings, queue: WorkQueue, handler: Callable[..., object] = complete
) -> Iterator[None]:
    """Run a worker for a queue."""
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


async def with_connection(settings: ConnectionSettings, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an async function with an open connection before its other arguments."""
    async with connect(settings) as connection:
        return await function(connection, *args, **kwargs)


@contextmanager
def dead_orders(settings: ConnectionSettings, name: str) -> Iterator[None]:
    """Make a queue with four dead letters of a busy bank and two malformed ones; run its worker."""
    busy = [json.dumps({"id": f"{name}-{number}", "amount": 1, "bank": "slow"}) for number in range(4)]
    malformed = [json.dumps({"id": f"{name}-{number}", "amount": "1,5", "bank": "fast"}) for number in (4, 5)]
    queue = blocking(with_connection(settings, make_queue, name))
    blocking(with_connection(settings, publish_jobs, queue, [*busy, *malformed]))
    with working(settings, queue, process):
        blocking(wait_for_letters(settings, queue, 6))
        yield
