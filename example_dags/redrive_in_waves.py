r"""Dead letters that come back in waves, with a gate after each: two as a canary, then four, then all others.

The bank is closed, so ``publish`` ends with twelve dead payments. ``redrive`` brings them back, and waits for the jobs
of each wave. Where more than half of a wave die again, it stops at the gate until a person has it go on, or aborts it::

    jetstream-queue redrive status example_dags/queues/payments.yaml
    jetstream-queue redrive resume example_dags/queues/payments.yaml <id> --why "the bank has opened"

With ``{"still_closed": 2}`` the canary dies again. What died again comes back with a later wave. Workers::

    jetstream-worker run --queue example_dags/queues/payments.yaml --consumer bank \
        --handler example_workers.payments:pay
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, Param

from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator

QUEUE = str(Path(__file__).parent / "queues" / "payments.yaml")
PAYMENTS = 12


def payments(params: dict[str, Any]) -> list[dict[str, Any]]:
    """Make the payments, each with the number of its attempts that find the bank closed."""
    return [
        {"id": f"payment-{number}", "closed": 2 if number < params["still_closed"] else 1} for number in range(PAYMENTS)
    ]


with DAG(
    "redrive_in_waves",
    schedule=None,
    catchup=False,
    max_active_runs=1,
    tags=["jetstream"],
    params={"still_closed": Param(0, type="integer", minimum=0, description="payments that die twice")},
    doc_md=__doc__,
) as dag:
    provision = JetStreamProvisionOperator(task_id="provision", work_queue=QUEUE)

    publish = JetStreamPublishOperator(
        task_id="publish",
        work_queue=QUEUE,
        subject="payments.new",
        jobs=payments,
        wait_for_completion=True,
        max_dead=None,
        wait_timeout=timedelta(minutes=10),
        deferrable=True,
    )

    redrive = JetStreamRedriveOperator(
        task_id="redrive",
        work_queue=QUEUE,
        waves=[2, 4, "rest"],
        stop_when=0.5,
        why="the bank was closed",
        wait_timeout=timedelta(hours=12),
        deferrable=True,
    )

    provision >> publish >> redrive
