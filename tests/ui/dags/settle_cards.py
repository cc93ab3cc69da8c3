"""Publishes a night's card payments; the queue in the documentation's pictures."""

from __future__ import annotations

import json
from uuid import UUID

from airflow.sdk import DAG

from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator

QUEUE = {
    "name": "card-settlements",
    "subjects": ["settlements.cards.>"],
    "max_msgs": 1_000,
    "duplicate_window": "10m",
    "consumers": [
        {
            "name": "settler",
            "filter_subject": "settlements.cards.>",
            "ack_wait": "10s",
            "max_deliver": 2,
            "max_ack_pending": 20,
        }
    ],
    "dead_letters": "card-settlements-dead",
    "events": "card-settlements-events",
}
_FIRST = 0x5F0F1F6E9A9D4E5C8A8B1F0C8E0F7A11


def payment(number: int) -> str:
    """Make a payment; of an acquirer that doesn't answer, or of a day that is closed, now and then."""
    return json.dumps(
        {
            "payment": str(UUID(int=_FIRST + number * 0x1_0000_0000_0001)),
            "amount": round(3.10 + number * 7.35, 2),
            "currency": "EUR",
            "acquirer": "worldline" if number % 5 == 0 else "adyen",
            "day": "2026-11-19" if number % 23 == 7 else "2026-11-22",
        }
    )


with DAG("settle_cards", schedule=None):
    provision = JetStreamProvisionOperator(task_id="provision", work_queue=QUEUE)
    publish = JetStreamPublishOperator(
        task_id="publish_payments",
        work_queue=QUEUE,
        subject="settlements.cards.eu-central-1.recurring",
        jobs=[payment(number) for number in range(180)],
        job_id="payment",
    )
    provision >> publish
