"""Publishes four receipts every two minutes and waits until each was sent, or is a dead letter.

Beside it the DAG that the page triggers to redrive dead letters.
"""

from datetime import UTC, datetime, timedelta

from airflow.sdk import DAG

from airflow_provider_jetstream.jetstream import Job
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.reprocessing import reprocess_dag

ADDRESSES = ["ada@example.org", "alan@example.org", "grace@example.org", "Edsger@Example.org"]

with DAG(
    "send_receipts",
    schedule=timedelta(minutes=2),
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
    tags=["jetstream"],
    doc_md=__doc__,
) as dag:
    JetStreamPublishOperator(
        task_id="send",
        work_queue="../queues/receipts.yaml",
        subject="receipts.monthly",
        jobs=[Job({"to": address}) for address in ADDRESSES],
        wait_for_completion=True,
        max_dead=None,
        deferrable=True,
    )

redrive = reprocess_dag()
