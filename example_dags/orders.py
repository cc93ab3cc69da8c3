r"""Twenty orders through a work queue: provision, publish and wait, find the dead letters, redrive them, all done.

Workers process the orders, in Python or in any other language; with this package's own::

    jetstream-worker run --queue example_dags/queues/orders.yaml --consumer processor \
        --handler example_workers.orders:process

An order that fails twice is a dead letter: the server's advisory about it is stored in ``orders_unprocessed``. A
handler may run beside this DAG, and knows nothing of it: it reads an advisory, gets the order by its sequence, handles
it and acknowledges the advisory. Handler and redrive share the consumer ``unprocessed_order_handler``, so each order is
done once, by whoever comes first. Such a handler, and a worker that fails half of its deliveries, are in
``tests/documents/foreign_orders.py``::

    python tests/documents/foreign_orders.py process orders_stream 'orders.*'
    python tests/documents/foreign_orders.py handle orders_unprocessed orders_stream

With ``{"rate": 1}`` the DAG publishes one order each second.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, Param, task

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream import Status
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from airflow_provider_jetstream.sensors.dead_letter import JetStreamDeadLetterSensor
from airflow_provider_jetstream.sensors.queue import JetStreamQueueDrainedSensor

QUEUE = str(Path(__file__).parent / "queues" / "orders.yaml")

with DAG(
    "orders",
    schedule=None,
    catchup=False,
    max_active_runs=1,
    tags=["jetstream"],
    params={
        "rate": Param(100, type="number", exclusiveMinimum=0, description="orders published each second"),
        "redrive_rate": Param(100, type="number", exclusiveMinimum=0, description="orders redriven each second"),
    },
    doc_md=__doc__,
) as dag:
    provision = JetStreamProvisionOperator(task_id="provision", work_queue=QUEUE)

    publish = JetStreamPublishOperator(
        task_id="publish",
        work_queue=QUEUE,
        subject="orders.new",
        jobs=[f"order-{number}" for number in range(20)],
        rate="{{ params.rate }}",
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
        rate="{{ params.redrive_rate }}",
        wait_for_completion=True,
        max_dead=None,
        wait_timeout=timedelta(minutes=10),
        deferrable=True,
    )

    # An order may die again after its redrive; then it is the handler's.
    settled = JetStreamQueueDrainedSensor(
        task_id="settled",
        work_queue=QUEUE,
        nothing_dead=True,
        deferrable=True,
        poke_interval=2,
        timeout=600,
        trigger_rule="none_failed",
    )

    @task(trigger_rule="none_failed")
    def all_done(published: Any, redriven: Any) -> dict[str, int]:
        """Fail unless every order was done: by a worker, at once or after its redrive, or by the handler."""
        completed = published["completed"] + (redriven["completed"] if redriven else 0)
        first = published["sequences"][0][0]
        dismissed = JetStreamHook().find_dead_letters(QUEUE).dismissed
        handled = sum(job.status == Status.HANDLED and job.sequence >= first for job in dismissed)
        if completed + handled != published["published"]:
            raise ValueError(
                f"expected {published['published']} orders that are done, found {completed} completed and {handled}"
                " handled"
            )
        return {"published": published["published"], "completed": completed, "handled": handled}

    provision >> publish >> sense >> redrive >> settled >> all_done(publish.output, redrive.output)
