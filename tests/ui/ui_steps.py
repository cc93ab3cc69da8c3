"""Steps of the page's tests: queues, dead letters and workers on a server."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from airflow_provider_jetstream.jetstream import Origin, connect
from airflow_provider_jetstream.worker import Delivery, Worker
from example_workers.store import process
from testbed.dead_letters import store_task, task_key
from testbed.face import summarise_dead_letters
from testbed.queues import eventually, make_queue, publish_jobs, pull_jobs, wait_for_entries

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue

ROOT = Path(__file__).resolve().parents[2]
STORE = ROOT / "example_dags" / "queues" / "store.yaml"

_Result = TypeVar("_Result")


def wait_for(condition: Callable[[], _Result | None], within: float = 60) -> _Result:
    """Wait until a condition returns something true; return that."""
    return blocking(eventually(condition, within))


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
    settings: ConnectionSettings,
    queue: WorkQueue,
    handler: Callable[..., object] = complete,
    consumer: str | None = None,
) -> Iterator[None]:
    """Run a worker for a queue, for its first consumer unless another is named."""
    started: list[tuple[asyncio.AbstractEventLoop, Worker]] = []

    async def run() -> None:
        worker = Worker(queue, consumer or queue.consumers[0].name, handler, settings)
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


_PUBLISHER = Origin(
    "settle_card_payments_eu_central_1",
    "scheduled__2026-11-22T02:00:00+00:00",
    "publish_outstanding_settlements",
    map_index=17,
)
SETTLEMENT_ERROR = (
    "acquirer worldline answered 504 for settlement 8f14e45f-ceea-4e5c-9d3b-0e1a2b3c4d5e after 3 attempts:"
    " upstream connect error or disconnect before headers"
)


def settlement_id(number: int) -> str:
    """Return the id of a job of :func:`dead_settlements`."""
    return str(UUID(int=0x5F0F1F6E9A9D4E5C8A8B1F0C8E0F7A11 + number))


async def dead_settlements(connection: Any, name: str, bodies: list[str], publisher: Origin = _PUBLISHER) -> list[int]:
    """Make a queue whose jobs have names as people give them, all dead: UUIDs as ids, subjects of many tokens.

    :param publisher: the task that published them
    """
    queue = await make_queue(connection, name)
    await store_task(connection, queue, publisher)
    jetstream = connection.client.jetstream()
    subject = f"{name}.jobs.eu-central-1.acquirer-worldline.card-not-present.recurring"
    task = {"Airflow-Task": task_key(publisher)}
    stored = []
    for number, body in enumerate(bodies):
        headers = {"Nats-Msg-Id": settlement_id(number)} | task
        stored.append((await jetstream.publish(subject, body.encode(), headers=headers)).seq)
    for message in await pull_jobs(connection, queue, len(stored), within=30):
        await message.respond(f"+TERM {SETTLEMENT_ERROR}".encode())
    await wait_for_entries(connection, queue, len(stored))
    return stored
