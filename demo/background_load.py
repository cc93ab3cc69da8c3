"""Load for the queues that stay open after the demo: orders, some of which fail, and a queue without workers."""

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Event, Thread

from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
from airflow_provider_jetstream.jetstream.client.settings import connection_settings
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from testbed.nats_server import NatsServer
from testbed.workers import start_worker

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "example_dags" / "queues" / "store.yaml"
SHOP = "shop"

_SECONDS_BETWEEN_ORDERS = 2.0
_MALFORMED_EVERY = 15


def dags_folder(folder: Path) -> Path:
    """Copy the example DAGs and the shop's DAG into one folder, and return it."""
    dags = folder / "dags"
    shutil.copytree(ROOT / "example_dags", dags / "example_dags")
    shutil.copytree(ROOT / "demo" / "dags", dags / "demo")
    return dags


@contextmanager
def background_load(nats: NatsServer, folder: Path) -> Iterator[None]:
    """Run a slow worker and a publisher of orders until the block ends."""
    env = {**os.environ, "NATS_URL": nats.url, "PYTHONPATH": str(ROOT)}
    stopping = Event()
    publisher = Thread(target=lambda: asyncio.run(_publish_orders(nats.url, stopping)), daemon=True)
    publisher.start()
    worker = start_worker(
        "slow-worker",
        queue=STORE,
        consumer="till",
        handler="demo.slow_worker:process",
        env=env,
        logs=folder / "workers",
        concurrency=2,
    )
    try:
        yield
    finally:
        stopping.set()
        worker.terminate(10)
        publisher.join(10)


async def _publish_orders(url: str, stopping: Event) -> None:
    async with connect(connection_settings({"servers": (url,)})) as connection:
        await provision(connection, WorkQueue.load(STORE))
        await _fill_idle_queue(connection)
        jetstream = connection.client.jetstream()
        for number in count():
            if stopping.is_set():
                return
            order: object = {"id": f"phone-{number}", "amount": 5, "bank": "fast"}
            body = (
                "hello? is this the store?" if number % _MALFORMED_EVERY == _MALFORMED_EVERY - 1 else json.dumps(order)
            )
            await jetstream.publish("store.orders.phone", body.encode())
            await asyncio.sleep(_SECONDS_BETWEEN_ORDERS)


async def _fill_idle_queue(connection: NatsPyConnection) -> None:
    """Fill a queue that has no worker."""
    declaration = {
        "name": "newsletter",
        "subjects": ["newsletter.>"],
        "consumers": [{"name": "mailer", "max_deliver": 3, "ack_wait": "30s"}],
        "dead_letters": "newsletter_dead",
        "max_msgs": 200,
    }
    await provision(connection, WorkQueue.load(declaration))
    for number in range(150):
        await connection.client.jetstream().publish(f"newsletter.{number}", b"{}")
