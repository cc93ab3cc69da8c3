r"""Publish here, wait there: one DAG publishes jobs and ends, another DAG waits for these jobs, and for no others.

``publish_here`` gives the result of its task to the run of ``wait_there`` that it starts. It has a handle on the jobs,
which is JSON and small, however many they are. The sensor waits in the triggerer, without a worker slot. Workers::

    jetstream-worker run --queue example_dags/queues/exports.yaml --consumer exporter \
        --handler example_workers.exports:export
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator
from airflow.sdk import DAG, task

from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.sensors.jobs import JetStreamJobsSensor

QUEUE = str(Path(__file__).parent / "queues" / "exports.yaml")
TABLES = ("customers", "orders", "payments")

with DAG("publish_here", schedule=None, catchup=False, tags=["jetstream"], doc_md=__doc__) as publish_here:
    provision = JetStreamProvisionOperator(task_id="provision", work_queue=QUEUE)
    publish = JetStreamPublishOperator(
        task_id="publish",
        work_queue=QUEUE,
        subject="exports.table",
        jobs=[{"id": table, "table": table} for table in TABLES],
    )
    hand_over = TriggerDagRunOperator(
        task_id="hand_over", trigger_dag_id="wait_there", conf={"published": publish.output}
    )
    provision >> publish >> hand_over

with DAG("wait_there", schedule=None, catchup=False, tags=["jetstream"], doc_md=__doc__) as wait_there:
    wait = JetStreamJobsSensor(
        task_id="wait", handle="{{ dag_run.conf['published'] }}", timeout=timedelta(hours=1), deferrable=True
    )

    @task
    def files(ended: Any) -> list[str]:
        """Return the files that the workers have written."""
        return sorted(result["file"] for result in ended["results"].values())

    files(wait.output)
