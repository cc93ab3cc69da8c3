"""Makers of DAGs, in another folder than the DAGs' files and the queues' files; imported by DAG files in ``made``."""

from __future__ import annotations

from typing import Any

from airflow.sdk import DAG, TaskGroup, dag, task

from airflow_provider_jetstream.assets.stream_asset import queue_asset
from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.notifications.jetstream import JetStreamNotifier
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.sensors.queue import JetStreamQueueDrainedSensor


def make_every_kind(dag_id: str, work_queue: str) -> DAG:
    """Make a DAG whose tasks name the queue's file in each way."""
    with DAG(dag_id, schedule=None, default_args={"retries": 0}) as made:
        provision = JetStreamProvisionOperator(task_id="provision", work_queue=work_queue)
        send: dict[str, Any] = {"work_queue": work_queue, "subject": "made.a", "jobs": [1]}
        plain = JetStreamPublishOperator(
            task_id="plain",
            outlets=[queue_asset(work_queue)],
            on_success_callback=JetStreamNotifier(subject="made.told", queue=work_queue),
            **send,
        )
        templated = JetStreamPublishOperator(task_id="templated", **send | {"work_queue": "{{ params.path }}"})
        made.params["path"] = work_queue
        mapped = JetStreamPublishOperator.partial(task_id="mapped", work_queue=work_queue, subject="made.a").expand(
            jobs=[[2], [3]]
        )
        paths = JetStreamPublishOperator.partial(task_id="paths", subject="made.a", jobs=[4]).expand(
            work_queue=[work_queue]
        )
        with TaskGroup("group"):
            grouped = JetStreamPublishOperator(task_id="grouped", **send)

        @task
        def by_hook() -> None:
            JetStreamHook().publish([5], subject="made.a", queue=work_queue)

        provision >> [plain, templated, mapped, paths, grouped, by_hook()]
    return made


def make_decorated(work_queue: str) -> DAG:
    """Make a DAG by Airflow's decorator."""

    @dag(dag_id="decorated", schedule=None)
    def decorated() -> None:
        JetStreamQueueDrainedSensor(task_id="drained", work_queue=work_queue)

    return decorated()


def make_from_declaration(declared: dict[str, dict[str, dict[str, Any]]], module_globals: dict[str, Any]) -> None:
    """Make DAGs of a declaration and put them into a module, as dag-factory does with YAML."""
    for dag_id, tasks in declared.items():
        made = DAG(dag_id, schedule=None)
        for task_id, arguments in tasks.items():
            # The operator is made before its DAG is known to it.
            operator = JetStreamPublishOperator(task_id=task_id, **arguments)
            operator.dag = made
        module_globals[dag_id] = made
