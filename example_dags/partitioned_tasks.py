r"""Tasks divided among consumers by the hash of their type, so that several workers do not wait for one another.

The stream ``TASKS`` began with one consumer, ``worker``, whose workers took tasks of every type
(``queues/tasks_unpartitioned.yaml``). Here each of three consumers, ``worker-0`` to ``worker-2``, has the tasks of its
partition, ``tasks.<partition>.<type>``; a task's type decides its partition, and all tasks of a type stay in order. The
publisher computes the partition; the server or any other client computes the same one. Workers, one or more for each
partition::

    for number in 0 1 2; do TASKS_RESULTS=/tmp/tasks jetstream-worker run --queue example_dags/queues/tasks.yaml \
        --consumer worker-$number --concurrency 10 --handler example_workers.tasks:process & done

``provision`` waits until the workers of the one consumer have done the tasks that are stored, then makes three of it;
each task is done once. Killed in the middle, it goes on when it runs again.

A worker without this package is in ``tests/documents/foreign_tasks.py``: it fetches ten tasks at a time, acknowledges
those that it has done and asks for the others again.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk import DAG, Param

from airflow_provider_jetstream.jetstream import Job
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator

if TYPE_CHECKING:
    from collections.abc import Iterator

QUEUE = str(Path(__file__).parent / "queues" / "tasks.yaml")
TYPES = ("email", "resize", "notify")


def tasks(params: dict[str, Any]) -> Iterator[Job]:
    """Make the tasks of every type."""
    for number in range(params["tasks"]):
        kind = TYPES[number % len(TYPES)]
        yield Job(f"{kind} {number}", f"tasks.{{partition}}.{kind}", id=f"{kind}-{number}", partition_key=kind)


with DAG(
    "partitioned_tasks",
    schedule=None,
    catchup=False,
    tags=["jetstream"],
    params={"tasks": Param(30, type="integer", minimum=1, description="tasks of all types together")},
    doc_md=__doc__,
) as dag:
    provision = JetStreamProvisionOperator(task_id="provision", work_queue=QUEUE, drain=True)

    publish = JetStreamPublishOperator(
        task_id="publish",
        work_queue=QUEUE,
        jobs=tasks,
        wait_for_completion=True,
        wait_timeout=timedelta(minutes=10),
        deferrable=True,
    )

    provision >> publish
