"""Tasks that stay on their slots while their jobs are about to end, and others that defer."""

from __future__ import annotations

from typing import Any

from airflow.sdk import DAG

from airflow_provider_jetstream.jetstream import Consumer, WorkQueue
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator

JOB_SECONDS = {"adaptive": 4.0, "one_second": 1.0, "three_seconds": 3.0, "held": 4.0, "at_once": 4.0}
SHORT = tuple(JOB_SECONDS)


def queue(name: str) -> WorkQueue:
    """Declare a queue in which a job is delivered once."""
    return WorkQueue(
        name=f"short_{name}",
        subjects=[f"short_{name}"],
        consumers=[Consumer(name="worker", max_deliver=1, ack_wait="1m")],
        dead_letters=f"short_{name}_dead",
        events=f"short_{name}_events",
    )


def waits(name: str, **arguments: Any) -> None:
    """Publish a job to the queue of this name, and wait for it."""
    JetStreamPublishOperator(
        task_id=name,
        work_queue=queue(name),
        subject=f"short_{name}",
        jobs=[name],
        wait_for_completion=True,
        deferrable=True,
        retries=0,
        **arguments,
    )


with DAG("short_waits", schedule=None, params={"hold": 600}):
    waits("adaptive")
    waits("one_second")
    waits("three_seconds")
    waits("held", defer_after="{{ params.hold }}")
    waits("at_once", defer_after=0)
    # No worker takes its job, and it can't end soon.
    waits("idle", wait_timeout="20s")
