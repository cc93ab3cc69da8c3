"""Orders that start a DAG by arriving: a doorbell rings, and the run pulls until none is left.

The watcher's trigger takes no order. It fires an event that says how many wait, at most every five seconds, and again
while orders wait; so an order is done also where a run failed, or Airflow made one run of several events. Each order is
acknowledged after it was done. Create the queue once::

    jetstream-queue queue apply example_dags/queues/orders_by_event.yaml

Where the environment names a file as ``EVENT_ORDERS_LEDGER``, each order is recorded in it.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from airflow.sdk import DAG, Asset, AssetWatcher

from airflow_provider_jetstream.operators.consume import jetstream_consume_task
from airflow_provider_jetstream.triggers.message import JetStreamMessageTrigger
from airflow_provider_jetstream.worker import GiveUpError

if TYPE_CHECKING:
    from airflow_provider_jetstream.worker import Delivery

QUEUE = str(Path(__file__).parent / "queues" / "orders_by_event.yaml")
CONSUMER = "fulfilment"

waiting_orders = Asset(
    "waiting_orders",
    watchers=[
        AssetWatcher(
            name="waiting_orders_doorbell",
            trigger=JetStreamMessageTrigger(work_queue=QUEUE, consumer=CONSUMER, interval=5),
        )
    ],
)

with DAG(
    "orders_by_event",
    schedule=[waiting_orders],
    catchup=False,
    max_active_runs=1,
    dagrun_timeout=timedelta(minutes=30),
    tags=["jetstream"],
    doc_md=__doc__,
) as dag:

    @jetstream_consume_task(work_queue=QUEUE, consumer=CONSUMER, batch=25)
    def fulfil(orders: list[Delivery]) -> list[GiveUpError | None]:
        """Do the orders; each has an outcome of its own."""
        outcomes = [GiveUpError("an order without a number") if not order.body else None for order in orders]
        if ledger := os.environ.get("EVENT_ORDERS_LEDGER"):
            lines = [json.dumps({"order": order.body.decode(errors="replace")}) + "\n" for order in orders]
            with Path(ledger).open("a", encoding="utf-8") as file:
                file.write("".join(lines))
        return outcomes

    fulfil()
