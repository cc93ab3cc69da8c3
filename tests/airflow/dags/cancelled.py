"""Tasks whose jobs are cancelled, scheduled, or divided into partitions."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG

from airflow_provider_jetstream.jetstream import Consumer, Job, WorkQueue
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator


def queue(name: str, **fields: Any) -> WorkQueue:
    """Declare a queue in which a job is delivered once."""
    consumers = [Consumer(name="worker", max_deliver=1, ack_wait="5s")]
    values = {
        "name": name,
        "subjects": [f"{name}.>"],
        "consumers": consumers,
        "events": f"{name}_events",
        # Longer than the pause before a retry, or the operator would warn.
        "duplicate_window": "2h",
    }
    return WorkQueue(**values | fields)


DIVIDED = queue(
    "divided",
    consumers=[{"name": "worker", "filter_subject": "divided.{partition}.>", "partitions": 4, "max_deliver": 1}],
    schedules=True,
)
RETRY: dict[str, Any] = {"retries": 1, "retry_delay": timedelta(hours=1)}


def waits(name: str, **kwargs: Any) -> None:
    """Publish two jobs and wait for them."""
    JetStreamPublishOperator(
        task_id=name,
        work_queue=queue(name),
        subject=f"{name}.a",
        jobs=[Job(b"", id=f"{name}-{number}") for number in range(2)],
        wait_for_completion=True,
        wait_timeout=timedelta(minutes=5),
        **RETRY | kwargs,
    )


with DAG("cancelled", schedule=None):
    waits("cancelled_deferred", deferrable=True)
    waits("cancelled_blocking", deferrable=False)
    waits("cancelled_allowed", deferrable=True, max_cancelled=1)

with DAG("divided", schedule=None):
    JetStreamPublishOperator(
        task_id="later",
        work_queue=DIVIDED,
        subject="divided.{partition}.email",
        jobs=[
            Job(b"now", partition_key="email"),
            Job(b"later", partition_key="email", delay="1s"),
            Job(b"nightly", id="nightly", partition_key="a", every="0 0 3 * * *"),
        ],
        **RETRY,
    )
    JetStreamPublishOperator(
        task_id="later_and_wait",
        work_queue=DIVIDED,
        # What a list shows to be wrong fails the parsing of the DAG.
        jobs=lambda: [Job(b"later", "divided.0.email", delay="1s")],
        wait_for_completion=True,
        **RETRY,
    )
