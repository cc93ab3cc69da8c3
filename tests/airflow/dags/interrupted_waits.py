"""Tasks whose waiting is interrupted: by people, by their triggerer's end, or since some jobs are enough."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG

from airflow_provider_jetstream.jetstream import Consumer, Job, WorkQueue
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator

TASKS = int(os.environ.get("WAITING_TASKS", "12"))
ENDED = ("marked_deferred", "marked_blocking", "cleared_deferred", "cleared_blocking")


def queue(name: str) -> WorkQueue:
    """Declare a queue in which a job is delivered once."""
    return WorkQueue(
        name=name,
        subjects=[name],
        consumers=[Consumer(name="worker", max_deliver=1, ack_wait="10m")],
        dead_letters=f"{name}_dead",
        events=f"{name}_events",
        duplicate_window="1h",
    )


def waits(name: str, *, count: int, deferrable: bool = True, **kwargs: Any) -> None:
    """Publish jobs with ids to the queue of the same name, and wait for them."""
    arguments: dict[str, Any] = {
        "work_queue": queue(name),
        "subject": name,
        "jobs": [Job(b"", id=f"{name}-{number}") for number in range(count)],
        "wait_for_completion": True,
        "wait_timeout": timedelta(minutes=10),
        "deferrable": deferrable,
        "retries": 0,
    }
    JetStreamPublishOperator(task_id=name, **{**arguments, **kwargs})


with DAG("ended", schedule=None):
    for task_id in ENDED:
        waits(task_id, count=3, deferrable="deferred" in task_id, cancel_on_kill=True)

with DAG("enough", schedule=None):
    waits("any_of_three", count=3, min_completed=1)
    waits("two_of_four", count=4, min_completed=2)
    waits("three_of_three", count=3, min_completed=3)
    waits("with_results", count=3)

# The first try times out before a worker processes the jobs.
with DAG("again", schedule=None):
    waits("again", count=3, wait_timeout=timedelta(seconds=4), retries=30, retry_delay=timedelta(seconds=1))

with DAG("moving", schedule=None, max_active_tasks=TASKS):
    JetStreamPublishOperator.partial(
        task_id="moving",
        work_queue=queue("moving"),
        subject="moving",
        wait_for_completion=True,
        wait_timeout=timedelta(hours=1),
        deferrable=True,
        cancel_on_kill=True,
        retries=0,
    ).expand(jobs=[[f"job-{number}"] for number in range(TASKS)])
