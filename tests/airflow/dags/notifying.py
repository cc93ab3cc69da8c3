"""A task that fails, and a run that fails with it: each publishes what happened."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, task

from airflow_provider_jetstream.jetstream import Consumer, WorkQueue
from airflow_provider_jetstream.notifications.jetstream import JetStreamNotifier

NOTICES = WorkQueue(
    name="notices",
    subjects=["notices.>"],
    consumers=[Consumer(name="pager", max_deliver=2)],
    dead_letters="notices_dead",
    events="notices_events",
)
PARCELS = WorkQueue(
    name="parcels",
    subjects=["parcels.>"],
    consumers=[Consumer(name="worker", max_deliver=2)],
    dead_letters="parcels_dead",
    events="parcels_events",
)

with DAG("notifying", schedule=None):

    @task(
        retries=1,
        retry_delay=timedelta(seconds=1),
        on_retry_callback=JetStreamNotifier(subject="notices.retry", message="tries again"),
        on_failure_callback=[
            JetStreamNotifier(
                subject="notices.{{ dag.dag_id }}", message="{{ ti.task_id }} failed", queue=NOTICES, diagnose=PARCELS
            ),
            JetStreamNotifier(subject="heard.by.nobody", message="plain"),
        ],
    )
    def fail() -> None:
        """Fail."""
        raise ValueError("the ledger is\nlocked")

    fail()
