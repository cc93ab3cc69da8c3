"""Sensors that wait for a queue to be drained, in every mode."""

from __future__ import annotations

from typing import Any

from airflow.sdk import DAG

from airflow_provider_jetstream.jetstream import Consumer, WorkQueue
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.sensors.queue import JetStreamQueueDrainedSensor

DRAINING = WorkQueue(
    name="draining",
    subjects=["draining"],
    consumers=[Consumer(name="worker", max_deliver=1, ack_wait="10s")],
    dead_letters="draining_dead",
)
UNDRAINED = WorkQueue(
    name="undrained",
    subjects=["undrained.>"],
    consumers=[Consumer(name="worker", filter_subject="undrained.a", max_deliver=1)],
    dead_letters=None,
)


def sensor(name: str, **kwargs: Any) -> JetStreamQueueDrainedSensor:
    """Wait in the triggerer for minutes by default."""
    arguments = {"work_queue": DRAINING, "poke_interval": 1, "timeout": 600, "deferrable": True}
    return JetStreamQueueDrainedSensor(task_id=name, **{**arguments, **kwargs})


with DAG("draining", schedule=None):
    waiting = [
        sensor("deferred"),
        sensor("poking", deferrable=False),
        # Airflow fails a task that is due again before it has seen the end of the process that rescheduled it.
        sensor("rescheduled", deferrable=False, mode="reschedule", poke_interval=5),
        sensor("nothing_dead", nothing_dead=True),
    ]
    waiting >> sensor("at_once", consumers=["{{ params.consumer }}"], params={"consumer": "worker"})

with DAG("undrained", schedule=None):
    JetStreamProvisionOperator(task_id="provision", work_queue=UNDRAINED) >> [
        sensor(name, work_queue=UNDRAINED, timeout=3, soft_fail=soft)
        for name, soft in (("skipped", True), ("failed", False))
    ]
