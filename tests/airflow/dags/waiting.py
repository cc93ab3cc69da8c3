"""Tasks that wait for their jobs, some of which must fail."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG

from airflow_provider_jetstream.jetstream import Consumer, WorkQueue
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator


def queue(name: str, **settings: Any) -> WorkQueue:
    """Declare a queue in which a job is delivered once."""
    return WorkQueue(
        name=name,
        subjects=[name],
        consumers=[Consumer(name="worker", max_deliver=1, ack_wait="5s")],
        dead_letters=f"{name}_dead",
        events=f"{name}_events",
        **settings,
    )


def waits(name: str, *, count: int, deferrable: bool = True, **kwargs: Any) -> JetStreamPublishOperator:
    """Publish jobs to the queue of the same name and wait for them."""
    arguments: dict[str, Any] = {
        "work_queue": queue(name),
        "subject": name,
        "jobs": [f"{name}-{number}" for number in range(count)],
        "wait_for_completion": True,
        "wait_timeout": timedelta(minutes=5),
        "deferrable": deferrable,
        "retries": 1,
        "retry_delay": timedelta(hours=1),
    }
    return JetStreamPublishOperator(task_id=name, **{**arguments, **kwargs})


UNAUDITED = queue("unaudited", audit=False)
PROGRESS = queue("progress", attempts=True)
FULL = queue("full", max_msgs=3, discard="new")
# It has no events stream, which could store the publish logs of tasks.
FORGETFUL = WorkQueue(name="forgetful", subjects=["forgetful"])

# Its jobs end while no triggerer runs.
with DAG("survives", schedule=None):
    waits("survives", count=10)

with DAG("progress", schedule=None):
    waits("progress", count=1, work_queue=PROGRESS)

# The first try fills the queue before all jobs are stored.
with DAG("full", schedule=None):
    waits("full", count=5, work_queue=FULL, retry_delay=timedelta(seconds=3), retries=20)

with DAG("forgetful", schedule=None):
    JetStreamPublishOperator(
        task_id="forgetful",
        work_queue=FORGETFUL,
        subject="forgetful",
        jobs=["forgetful-0"],
        retries=1,
        retry_delay=timedelta(hours=1),
    )

# None of these may be tried again: its jobs are dead either way.
with DAG("deaths", schedule=None):
    waits("dead_inline", count=3, max_dead=1)
    waits("dead_deferred", count=3, max_dead=1)
    waits("dead_blocking", count=3, max_dead=1, deferrable=False)
    waits("dead_allowed", count=3, max_dead=3)

# No worker processes all of their jobs; another try may find them completed.
with DAG("too_late", schedule=None):
    waits("late_deferred", count=5, wait_timeout=timedelta(seconds=4))
    for late in (queue("late_redrive"), UNAUDITED):
        JetStreamRedriveOperator(
            task_id=late.name,
            work_queue=late,
            wait_for_completion=True,
            wait_timeout=timedelta(seconds=4),
            deferrable=True,
            retries=1,
            retry_delay=timedelta(hours=1),
        )
    waits("late_blocking", count=5, wait_timeout=timedelta(seconds=4), deferrable=False)
