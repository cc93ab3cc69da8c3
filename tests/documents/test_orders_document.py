"""The store's orders on two load-balanced instances: exactly one processes each; failed ones are in the DLQ."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.dead_letters.find import find_dead_letters
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.redrive.redrive import redrive_dead_letters
from testbed.queues import eventually, stored_count
from testbed.workers import start_worker

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
    from testbed.nats_server import NatsServer

ROOT = Path(__file__).resolve().parent.parent.parent
ORDERS = 40


async def test_two_instances_share_the_orders_and_exactly_one_processes_each(
    nats: NatsServer, connection: NatsPyConnection, tmp_path: Path
) -> None:
    queue = WorkQueue.load(ROOT / "example_dags" / "queues" / "orders.yaml")
    await provision(connection, queue)
    for number in range(ORDERS):
        ack = await connection.client.request("orders.new", f"order-{number}".encode())
        assert json.loads(ack.data)["stream"] == "orders_stream"
    ledger = tmp_path / "ledger"
    workers = [
        start_worker(
            f"instance-{number}",
            queue=ROOT / "example_dags" / "queues" / "orders.yaml",
            consumer="processor",
            handler="example_workers.orders:process",
            env=os.environ
            | {
                "NATS_URL": nats.url,
                "ORDERS_LEDGER": str(ledger),
                "PYTHONPATH": os.pathsep.join([str(ROOT), *(path for path in sys.path if path)]),
            },
            logs=tmp_path,
        )
        for number in range(2)
    ]
    try:

        async def all_processed_or_dead() -> bool:
            dead = await stored_count(connection, "orders_unprocessed")
            return 0 < dead == await stored_count(connection, "orders_stream")

        await eventually(all_processed_or_dead, within=60)
        letters = (await find_dead_letters(connection, queue)).letters
        assert 0 < len(letters) < ORDERS
        assert len(processed(ledger)) == ORDERS - len(letters)
        await redrive_dead_letters(connection, queue)
        await eventually(lambda: len(processed(ledger)) == ORDERS, within=60)
    finally:
        for worker in workers:
            worker.terminate()
    lines = processed(ledger)
    assert sorted(line["order"] for line in lines) == sorted(f"order-{number}" for number in range(ORDERS))
    assert len({line["process"] for line in lines}) == 2


def processed(ledger: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []
