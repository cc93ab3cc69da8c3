"""A thousand tasks that never get a worker slot: the test defers them itself."""

from __future__ import annotations

from airflow.sdk import DAG

from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator

COUNT = 1_000
NO_SLOTS = "no_slots"

with DAG("thousand_tasks", schedule=None):
    JetStreamPublishOperator.partial(
        task_id="wait", work_queue="/never/loaded.yaml", subject="jobs", pool=NO_SLOTS
    ).expand(jobs=[[str(number)] for number in range(COUNT)])
