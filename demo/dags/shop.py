"""A shop that receives twenty orders every minute, so that the page always has something to show."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from airflow.sdk import DAG

from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator

if TYPE_CHECKING:
    from collections.abc import Iterator

QUEUE = str(Path(__file__).resolve().parents[1] / "example_dags" / "queues" / "store.yaml")


def orders(run_id: str) -> Iterator[str]:
    """Generate orders; for some the bank is busy, some are malformed."""
    for number in range(20):
        chance = sha256(f"{run_id} {number}".encode()).digest()[0]
        amount: object = chance / 4 if chance % 16 else "12,50"
        yield json.dumps({"id": f"{run_id}-{number}", "amount": amount, "bank": "fast" if chance % 12 else "slow"})


with DAG("shop", schedule=timedelta(minutes=1), start_date=datetime(2026, 1, 1, tzinfo=UTC), catchup=False):
    provision = JetStreamProvisionOperator(task_id="provision", work_queue=QUEUE)
    publish = JetStreamPublishOperator(
        task_id="publish",
        work_queue=QUEUE,
        subject="store.orders.web",
        jobs=orders,
        retries=1,
        retry_delay=timedelta(seconds=10),
    )
    provision >> publish
