"""Tasks that publish again: a retry whose source lists the jobs in another order, and clears beside running jobs."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import DAG

from airflow_provider_jetstream.jetstream import Consumer, WorkQueue
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator

if TYPE_CHECKING:
    from collections.abc import Iterator


def queue(name: str) -> WorkQueue:
    """Declare a queue whose jobs stay in flight for long."""
    return WorkQueue(
        name=name,
        subjects=[name],
        consumers=[Consumer(name="worker", max_deliver=1, ack_wait="10m")],
        dead_letters=f"{name}_dead",
        events=f"{name}_events",
    )


def permuted(ti: Any) -> Iterator[object]:
    """List the same jobs in another order at each try, as a query without ORDER BY may; the first try fails midway."""
    listed = [f"job-{number}" for number in range(6)]
    for count, job in enumerate(listed if ti.try_number == 1 else reversed(listed)):
        if ti.try_number == 1 and count == 3:
            raise RuntimeError("the source of the jobs failed")
        yield job


with DAG("permuted", schedule=None):
    JetStreamPublishOperator(
        task_id="permuted",
        work_queue=queue("permuted"),
        subject="permuted",
        jobs=permuted,
        retries=1,
        retry_delay=timedelta(seconds=1),
    )

with DAG("siblings", schedule=None):
    JetStreamPublishOperator(
        task_id="siblings",
        work_queue=queue("siblings"),
        subject="siblings",
        jobs=["dies", "runs"],
        wait_for_completion=True,
        wait_timeout=timedelta(minutes=10),
        deferrable=True,
        retries=0,
    )
