"""Spark applications that don't end by themselves."""

from __future__ import annotations

import tempfile
from typing import Any

from airflow.sdk import DAG

from airflow_provider_jetstream.jetstream import WorkQueue
from airflow_provider_jetstream.operators.spark import JetStreamDeadLetterReportOperator

QUEUE = WorkQueue(
    name="sparking",
    subjects=["sparking.>"],
    consumers=[{"name": "worker", "max_deliver": 1, "ack_wait": "1s"}],
    dead_letters="sparking_dead",
)


def report(task_id: str, **kwargs: Any) -> None:
    """Report on a queue."""
    JetStreamDeadLetterReportOperator(
        task_id=task_id, work_queue=QUEUE, directory=tempfile.gettempdir(), retries=0, **kwargs
    )


# A person marks it as failed while its connection provider sleeps.
with DAG("spark_killed", schedule=None):
    options = {"connection": "slow", "connectionProvider": "tests.slow_provider:find"}
    report("spark_killed", spark_conf={f"spark.jetstream.{name}": value for name, value in options.items()})

with DAG("spark_elsewhere", schedule=None):
    # Without a property that says how executors find NATS, the task fails before it connects to the master.
    conf = {"spark.jetstream.connection": "elsewhere"}
    report("spark_elsewhere", spark_conn_id="spark_unreachable", spark_conf=conf)
