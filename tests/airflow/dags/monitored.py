"""A task whose jobs no worker processes, for the monitor to show."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG

from airflow_provider_jetstream.jetstream import Consumer, WorkQueue
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator

MONITORED = WorkQueue(
    name="monitored",
    subjects=["monitored"],
    consumers=[Consumer(name="worker", max_deliver=1, ack_wait="5s")],
    dead_letters="monitored_dead",
    events="monitored_events",
)

with DAG("monitored", schedule=None):
    JetStreamPublishOperator(
        task_id="publish",
        work_queue=MONITORED,
        subject="monitored",
        jobs=[f"job-{number}" for number in range(10)],
        wait_for_completion=True,
        wait_timeout=timedelta(minutes=3),
        deferrable=True,
        retries=0,
    )
