r"""Twenty orders through a work queue: provision, publish and wait, find the dead letters, redrive them.

Workers process the orders, in Python or in any other language; with this package's own::

    jetstream-worker run --queue example_dags/queues/orders.yaml --consumer processor \
        --handler example_workers.orders:process
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG, task

from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from airflow_provider_jetstream.sensors.dead_letter import JetStreamDeadLetterSensor

QUEUE = str(Path(__file__).parent / "queues" / "orders.yaml")

with DAG("orders", schedule=None, catchup=False, tags=["jetstream"], doc_md=__doc__) as dag:
    provision = JetStreamProvisionOperator(task_id="provision", work_queue=QUEUE)

    publish = JetStreamPublishOperator(
        task_id="publish",
        work_queue=QUEUE,
        subject="orders.new",
        jobs=[f"order-{number}" for number in range(20)],
        wait_for_completion=True,
        max_dead=None,
        wait_timeout=timedelta(minutes=10),
        deferrable=True,
    )

    sense = JetStreamDeadLetterSensor(
        task_id="sense",
        work_queue=QUEUE,
        deferrable=True,
        poke_interval=2,
        timeout=120,
        soft_fail=True,
    )

    redrive = JetStreamRedriveOperator(
        task_id="redrive",
        work_queue=QUEUE,
        wait_for_completion=True,
        wait_timeout=timedelta(minutes=10),
        deferrable=True,
    )

    @task(trigger_rule="none_failed")
    def all_done(published: dict[str, int], redriven: dict[str, int] | None) -> dict[str, int]:
        """Fail unless every order was completed, at once or after its redrive."""
        completed = published["completed"] + (redriven["completed"] if redriven else 0)
        if completed != published["published"]:
            raise ValueError(f"expected {published['published']} completed orders, found {completed}")
        return {"published": published["published"], "completed": completed}

    provision >> publish >> sense >> redrive
    all_done(publish.output, redrive.output)
