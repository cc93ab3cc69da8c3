"""A thousand tasks that no worker slot will ever be free for: the test defers them itself."""

from __future__ import annotations

from airflow.sdk import DAG

from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator

CROWD = 1_000
NO_SLOTS = "no_slots"

with DAG("crowd", schedule=None):
    JetStreamPublishOperator.partial(task_id="crowd", work_queue="never loaded", subject="crowd", pool=NO_SLOTS).expand(
        jobs=[[str(number)] for number in range(CROWD)]
    )
