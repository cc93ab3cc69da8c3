"""Publishes the evening's orders of a shop; the queue of docs/runbook.md."""

from __future__ import annotations

from pathlib import Path

from airflow.sdk import DAG

from airflow_provider_jetstream.jetstream import Job
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator

QUEUE = str(Path(__file__).parent / "orders.yaml")
ORDERS = 320
# Three of five totals have a separator of thousands.
_TOTALS = ("84,90", "1.249,00", "2.018,50", "1.730,00", "312,40")


def order(number: int) -> Job:
    """Make an order; now and then of a customer whose account is closed."""
    total = _TOTALS[number % len(_TOTALS)]
    key = f"2026-11-{48_200 + number}"
    body = {
        "order": key,
        "customer": 70_412 + 37 * number,
        "account": "closed" if number % 15 == 0 else "active",
        "total": total,
        "currency": "EUR",
    }
    return Job(body, id=key, headers={"Job-Release": "2026.47"})


with DAG("charge_orders", schedule=None):
    JetStreamPublishOperator(
        task_id="publish_orders",
        work_queue=QUEUE,
        subject="shop.orders.web",
        jobs=[order(number) for number in range(ORDERS)],
    )
