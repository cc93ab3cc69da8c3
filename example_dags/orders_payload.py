"""Orders that start a DAG by arriving, each with its body in an event of its own; needs Airflow 3.3.

The watcher's trigger takes the orders, and acknowledges each once Airflow's database has its event. A run gets the
events that came since the run before, so a run may have several orders, in any order; after a crash an order may come
twice. The task therefore goes by the number of the order. Create the queue once::

    jetstream-queue queue apply example_dags/queues/orders_payload.yaml

An order that isn't JSON becomes a dead letter. Where the environment names a file as ``PAYLOAD_ORDERS_LEDGER``, each
order is recorded in it.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk import DAG, Asset, AssetWatcher, task

from airflow_provider_jetstream.triggers.message import JetStreamMessageTrigger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

QUEUE = str(Path(__file__).parent / "queues" / "orders_payload.yaml")

arrived_orders = Asset(
    "arrived_orders",
    watchers=[
        AssetWatcher(
            name="arrived_orders_payload",
            trigger=JetStreamMessageTrigger(work_queue=QUEUE, consumer="airflow", mode="payload", body="json"),
        )
    ],
)

with DAG(
    "orders_payload",
    schedule=[arrived_orders],
    catchup=False,
    max_active_runs=1,
    dagrun_timeout=timedelta(minutes=10),
    tags=["jetstream"],
    doc_md=__doc__,
) as dag:

    @task
    def fulfil(triggering_asset_events: Mapping[Asset, Sequence[Any]] | None = None) -> int:
        """Do the orders of all events that the run has got, each once."""
        messages = [event.extra["payload"] for events in (triggering_asset_events or {}).values() for event in events]
        orders = {message["sequence"]: message["body"] for message in messages}
        if ledger := os.environ.get("PAYLOAD_ORDERS_LEDGER"):
            lines = [json.dumps({"sequence": number, "order": order}) + "\n" for number, order in orders.items()]
            with Path(ledger).open("a", encoding="utf-8") as file:
                file.write("".join(lines))
        return len(orders)

    fulfil()
