"""Creates the example queues, fills them and keeps publishing, at a pace that a person can follow."""

from __future__ import annotations

import asyncio
import itertools
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_provider_jetstream.dev.worker_processes import start_worker
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.jetstream.publication import publish
from airflow_provider_jetstream.jetstream.publishing.job import Job
from airflow_provider_jetstream.jetstream.publishing.report import PublishError
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

if TYPE_CHECKING:
    from airflow_provider_jetstream.dev.process import Process
    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection

# Files that workers and Airflow load: nothing of the package imports them.
EXAMPLE = Path(__file__).resolve().parent / "example"
DAGS = EXAMPLE / "dags"
DAG_ID = "send_receipts"
QUEUES = ("receipts", "thumbnails", "reminders")
# Consumer, handler and jobs at a time of each queue that has a worker.
_WORKERS = {"receipts": ("sender", "send_receipt", 4), "thumbnails": ("renderer", "render_thumbnail", 2)}
_NAMES = ("ada", "alan", "barbara", "donald", "edsger", "frances", "grace", "john", "katherine", "margaret")
_RECEIPTS, _THUMBNAILS = "receipts.orders", "thumbnails.new"
_RECEIPTS_AT_FIRST = 60
_THUMBNAILS_AT_FIRST = 60
_REMINDERS = 150
_BUSY_EVERY = 9
_CAPITALS_EVERY = 14
_DOCUMENT_EVERY = 12


def queue_file(name: str) -> Path:
    """Return the path of an example queue's declaration."""
    return EXAMPLE / "queues" / f"{name}.yaml"


def start_workers(url: str, logs: Path) -> list[Process]:
    """Start a worker for each queue that has one.

    :param url: of the nats-server
    :param logs: the folder of their output
    """
    # Credentials and contexts of this user are for other servers.
    env = {name: value for name, value in os.environ.items() if not name.startswith("NATS_")}
    env |= {"NATS_URL": url, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(EXAMPLE)}
    return [
        start_worker(
            f"{name}-worker",
            queue=queue_file(name),
            consumer=consumer,
            handler=f"handlers:{handler}",
            env=env,
            logs=logs,
            concurrency=concurrency,
        )
        for name, (consumer, handler, concurrency) in _WORKERS.items()
    ]


async def create_queues(connection: NatsPyConnection) -> None:
    """Create the queues and fill them."""
    receipts, thumbnails, reminders = (WorkQueue.load(queue_file(name)) for name in QUEUES)
    for queue in (receipts, thumbnails, reminders):
        await provision(connection, queue)
    await publish(connection, receipts, map(receipt, range(_RECEIPTS_AT_FIRST)), subject=_RECEIPTS)
    await publish(connection, thumbnails, map(thumbnail, range(_THUMBNAILS_AT_FIRST)), subject=_THUMBNAILS)
    calls = [Job({"call": _NAMES[number % len(_NAMES)]}, subject=f"reminders.{number}") for number in range(_REMINDERS)]
    await publish(connection, reminders, calls)


async def publish_without_end(connection: NatsPyConnection, pause: float = 1.0) -> None:
    """Publish a receipt and a thumbnail after each pause, until this is cancelled.

    :param pause: in seconds
    """
    receipts, thumbnails = (WorkQueue.load(queue_file(name)) for name in ("receipts", "thumbnails"))
    for number in itertools.count():
        await asyncio.sleep(pause)
        # Jobs that nobody redrives fill a queue after some hours; it shows on the page.
        with suppress(PublishError):
            await publish(connection, receipts, [receipt(_RECEIPTS_AT_FIRST + number)], subject=_RECEIPTS)
        with suppress(PublishError):
            await publish(connection, thumbnails, [thumbnail(_THUMBNAILS_AT_FIRST + number)], subject=_THUMBNAILS)


def receipt(number: int) -> dict[str, object]:
    """Return the body of a receipt; some fail, always the same ones. Mailboxes are busy only at first."""
    address = f"{_NAMES[number % len(_NAMES)]}@example.org"
    if number % _CAPITALS_EVERY == _CAPITALS_EVERY - 1:
        return {"to": address.upper(), "order": number}
    if number < _RECEIPTS_AT_FIRST and number % _BUSY_EVERY == _BUSY_EVERY - 1:
        return {"to": address, "order": number, "busy": True}
    return {"to": address, "order": number}


def thumbnail(number: int) -> dict[str, object]:
    """Return the body of a thumbnail's job; some aren't about an image."""
    kind = "pdf" if number % _DOCUMENT_EVERY == _DOCUMENT_EVERY - 1 else "jpg"
    return {"file": f"photo-{number}.{kind}"}
