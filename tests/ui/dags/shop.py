"""A shop whose orders fail in every way that the page shows."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG

from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator

QUEUE = str(Path(__file__).resolve().parents[1] / "example_dags" / "queues" / "store.yaml")
EVIL = "</pre><script>window.stolen = 1; alert(1)</script><img src=x onerror='window.stolen = 2'>"


def order(number: int, **fields: object) -> str:
    """Make an order of which a worker of the store says that the bank is busy, unless the fields say otherwise."""
    return json.dumps({"id": f"order-{number}", "amount": 12.5, "bank": "slow", "note": EVIL, **fields})


BUSY = [order(number) for number in range(6)]
MALFORMED = [order(number, amount="12,50", bank="fast") for number in (6, 7)]
POISON = [f"no order but {EVIL}"]

with DAG("shop", schedule=None):
    provision = JetStreamProvisionOperator(task_id="provision", work_queue=QUEUE)
    publish = JetStreamPublishOperator(
        task_id="publish",
        work_queue=QUEUE,
        subject="store.orders.web",
        jobs=[*BUSY, *MALFORMED, *POISON],
        retries=1,
        retry_delay=timedelta(minutes=1),
    )
    provision >> publish
