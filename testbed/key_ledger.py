"""Jobs of several customers, and a ledger of the order in which workers did them."""

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

from nats.aio.msg import Msg

from airflow_provider_jetstream.jetstream import WorkQueue
from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
from airflow_provider_jetstream.jetstream.client.stream_api import consumer_info
from testbed.queues import CONSUMER, eventually, exhaust_deliveries, publish_jobs


async def make_keyed_letters(connection: NatsPyConnection, queue: WorkQueue, keys: Iterable[str]) -> list[str]:
    """Make dead letters of customers; a job's body is its customer and its number there."""
    bodies: list[str] = []
    numbers: dict[str, int] = defaultdict(int)
    for key in keys:
        numbers[key] += 1
        bodies.append(f"{key}{numbers[key]}")
        await publish_jobs(connection, queue, bodies[-1:], headers={"Customer": key})
    await exhaust_deliveries(connection, queue, len(bodies))
    return bodies


class KeyLedger:
    """What workers that only acknowledge their jobs did: each start and each end, in order."""

    def __init__(self, connection: NatsPyConnection, queue: WorkQueue, *, fails: Iterable[str] = ()) -> None:
        self._connection = connection
        self._queue = queue
        self._fails = set(fails)
        self.events: list[tuple[str, str]] = []
        self.most_at_once = 0
        self._running = 0

    def of(self, what: str, key: str = "") -> list[str]:
        """Return the jobs of a customer, or of all, that were started (``start``), done (``end``) or failed."""
        return [body for event, body in self.events if event == what and body.startswith(key)]

    async def _do(self, message: Msg, seconds: float) -> None:
        body = message.data.decode()
        self.events.append(("start", body))
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        await asyncio.sleep(seconds)
        self._running -= 1
        self.events.append(("fail" if body in self._fails else "end", body))
        await (message.nak() if body in self._fails else message.ack_sync())

    async def _is_drained(self) -> bool:
        info = await consumer_info(self._connection, self._queue.name, CONSUMER)
        return not info["num_pending"] and not info["num_ack_pending"]

    @asynccontextmanager
    async def workers(self, rng: random.Random | None = None, slow: float = 0.05) -> AsyncIterator[None]:
        """Run workers that take as many jobs at once as there are."""
        jobs: set[asyncio.Task[None]] = set()

        async def run() -> None:
            jetstream = self._connection.client.jetstream()
            pull = await jetstream.pull_subscribe_bind(CONSUMER, stream=self._queue.name)
            while True:
                with suppress(TimeoutError):
                    for message in await pull.fetch(10, timeout=0.2):
                        jobs.add(asyncio.create_task(self._do(message, rng.uniform(0, slow) if rng else slow)))

        worker = asyncio.create_task(run())
        try:
            yield
            await eventually(self._is_drained)
        finally:
            worker.cancel()
            await asyncio.gather(worker, *jobs, return_exceptions=True)

    def violations(self, bodies: Iterable[str]) -> dict[str, list[tuple[str, str]]]:
        """Return what was done by customer, unless it was each of the customer's jobs once, one after the other."""
        by_key: dict[str, list[str]] = defaultdict(list)
        for body in bodies:
            by_key[body[0]].append(body)
        found: dict[str, list[tuple[str, str]]] = {}
        for key, expected in by_key.items():
            events = [event for event in self.events if event[1].startswith(key)]
            if events != [event for body in expected for event in (("start", body), ("end", body))]:
                found[key] = events
        return found
