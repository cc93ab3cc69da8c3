r"""Jobs of two priorities, each with publishers and workers of its own; what can't be done is a dead letter.

Ten publishers for each priority share 5,000 jobs. Each waits for its jobs without holding a worker slot. The stream
refuses new jobs once it holds 20,000, and the publishers then wait for room. Twelve workers process them, ten of them
urgent ones only::

    for id in $(seq 10); do jetstream-worker run --queue example_dags/queues/jobs.yaml --consumer high --id $id \
        --handler example_workers.jobs:process & done
    for id in 1 2; do jetstream-worker run --queue example_dags/queues/jobs.yaml --consumer low --id $id \
        --handler example_workers.jobs:process & done

Workers without this package may run beside them; ``tests/documents/foreign_jobs.py`` is one, in bare nats-py.
A job whose body is ``bad`` uses up its three deliveries, and its advisory is stored in ``jobs_dlq``, which is marked as
a dead letter queue in its metadata. The result is how many of each priority were completed, and which are dead.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, Param, get_current_context, task

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator

QUEUE = str(Path(__file__).parent / "queues" / "jobs.yaml")
PRIORITIES = ("high", "low")

with DAG(
    "priority_jobs",
    schedule=None,
    catchup=False,
    tags=["jetstream"],
    params={
        "jobs": Param(5_000, type="integer", minimum=1, description="jobs of each priority"),
        "publishers": Param(10, type="integer", minimum=1, description="publishers of each priority"),
        "bad": Param(0, type="integer", minimum=0, description="jobs of low priority that can't be done"),
    },
    doc_md=__doc__,
) as dag:
    provision = JetStreamProvisionOperator(task_id="provision", work_queue=QUEUE)

    @task
    def shares(priority: str) -> list[list[str]]:
        """Divide the jobs of a priority among its publishers."""
        params = get_current_context()["params"]
        jobs = [f"{priority} {number}" for number in range(params["jobs"])]
        if priority == PRIORITIES[-1]:
            jobs += ["bad"] * params["bad"]
        return [jobs[publisher :: params["publishers"]] for publisher in range(params["publishers"])]

    @task
    def report(published: Any) -> dict[str, Any]:
        """Count what was completed, and read the dead letter queue."""
        completed = [sum(share["completed"] for share in shares) for shares in published]
        letters = JetStreamHook().find_dead_letters(QUEUE).letters
        return {
            "completed": dict(zip(PRIORITIES, completed, strict=True)),
            "dead": [{"sequence": letter.sequence, "deliveries": letter.death.deliveries} for letter in letters],
        }

    publishers = []
    for priority in PRIORITIES:
        publish = JetStreamPublishOperator.partial(
            task_id=f"publish_{priority}",
            work_queue=QUEUE,
            subject=f"jobs.{priority}.my_job_id",
            # A publisher waits while the queue is full, as long as workers make room.
            room_timeout="5m",
            wait_for_completion=True,
            max_dead=None,
            wait_timeout=timedelta(minutes=10),
            deferrable=True,
        ).expand(jobs=shares.override(task_id=f"shares_{priority}")(priority))
        provision >> publish
        publishers.append(publish)
    report([publish.output for publish in publishers])
