"""Tasks that wait for the jobs of a date, in runs that Airflow makes for several dates."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.sdk import DAG

from airflow_provider_jetstream.jetstream import Consumer, Job, WorkQueue
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator

DATES = ("2026-01-01", "2026-01-02", "2026-01-03")
SCHEDULED: dict[str, Any] = {
    "schedule": "@daily",
    "start_date": datetime(2026, 1, 1, tzinfo=UTC),
    # The last interval that may begin: without it, runs of today would be among them.
    "end_date": datetime(2026, 1, 3, tzinfo=UTC),
}


def queue(name: str) -> WorkQueue:
    """Declare a queue whose jobs are delivered once."""
    return WorkQueue(
        name=name,
        subjects=[name],
        consumers=[Consumer(name="worker", max_deliver=1, ack_wait="10m")],
        dead_letters=f"{name}_dead",
        events=f"{name}_events",
    )


def waits(name: str, *, depends_on_past: bool) -> None:
    """Publish the job of a date to the queue of the same name, and wait for it."""
    JetStreamPublishOperator(
        task_id=name,
        work_queue=queue(name),
        subject=name,
        jobs=[Job("{{ ds }}", id="{{ ds }}")],
        wait_for_completion=True,
        wait_timeout="30m",
        deferrable=True,
        defer_after=0,
        depends_on_past=depends_on_past,
        # A try that must not come would come so late.
        retries=1,
        retry_delay=timedelta(hours=1),
    )


with DAG("caught_up", catchup=True, **SCHEDULED):
    waits("caught_up", depends_on_past=True)

with DAG("filled", catchup=False, **SCHEDULED):
    waits("filled", depends_on_past=False)
