"""Keeps queues lively after the demo: orders that come, are done and fail, and jobs that nobody does."""

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
from airflow_provider_jetstream.jetstream.client.connection import Connection
from airflow_provider_jetstream.jetstream.client.settings import connection_settings
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from testbed.nats_server import NatsServer
from testbed.workers import start_worker

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "example_dags" / "queues" / "store.yaml"
SHOP = "shop"

_SECONDS_BETWEEN_CALLS = 2.0
_EVERY = 15


def dags_folder(folder: Path) -> Path:
    """
    Put the example DAGs and the shop's together, and return where.

    :param folder: for everything that the demo writes
    """
    dags = folder / "dags"
    shutil.copytree(ROOT / "example_dags", dags / "example_dags")
    shutil.copytree(ROOT / "demo" / "dags", dags / "demo")
    return dags


@contextmanager
def background_load(nats: NatsServer, folder: Path) -> Iterator[None]:
    """
    Keep a till at work and customers on the phone.

    :param nats: the server
    :param folder: for logs
    """
    env = {**os.environ, "NATS_URL": nats.url, "PYTHONPATH": str(ROOT)}
    closing = Event()
    phone = Thread(target=lambda: asyncio.run(_call(nats.url, closing)), daemon=True)
    phone.start()
    till = start_worker(
        "till",
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
        closing.set()
        till.terminate(10)
        phone.join(10)


async def _call(url: str, closing: Event) -> None:
    async with connect(connection_settings({"servers": (url,)})) as connection:
        await provision(connection, WorkQueue.load(STORE))
        await _leave_alone(connection)
        jetstream = connection.client.jetstream()
        for number in count():
            if closing.is_set():
                return
            order: object = {"id": f"phone-{number}", "amount": 5, "bank": "fast"}
            body = "hello? is this the store?" if number % _EVERY == _EVERY - 1 else json.dumps(order)
            await jetstream.publish("store.orders.phone", body.encode())
            await asyncio.sleep(_SECONDS_BETWEEN_CALLS)


async def _leave_alone(connection: Connection) -> None:
    """Fill a queue that nobody works on."""
    declared = {
        "name": "newsletter",
        "subjects": ["newsletter.>"],
        "consumers": [{"name": "mailer", "max_deliver": 3, "ack_wait": "30s"}],
        "dead_letters": "newsletter_dead",
        "max_msgs": 200,
    }
    await provision(connection, WorkQueue.load(declared))
    for number in range(150):
        await connection.client.jetstream().publish(f"newsletter.{number}", b"{}")
