r"""A queue's policy, applied every night: letters that it keeps no longer are discarded, with the reason in the audit.

``dead_letters.keep`` in ``queues/payments.yaml`` says how long letters of each reason are kept. As long as a copy is
stored, the id of the redrive brings them back, parked::

    jetstream-queue redrive undo example_dags/queues/payments.yaml <id>
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG, Param

from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator

QUEUE = str(Path(__file__).parent / "queues" / "payments.yaml")

with DAG(
    "letter_retention",
    schedule="@daily",
    catchup=False,
    max_active_runs=1,
    dagrun_timeout=timedelta(hours=6),
    tags=["jetstream"],
    params={"queue": Param(QUEUE, type="string", description="the file that declares the queue")},
    doc_md=__doc__,
) as dag:
    JetStreamRedriveOperator(
        task_id="apply", work_queue="{{ params.queue }}", discard="by_policy", why="every night", retries=2
    )
