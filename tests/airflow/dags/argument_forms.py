"""Arguments whose values come from templates, and a queue's file beside the file of the DAG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from airflow.sdk import DAG, task

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream import Job, WorkQueue
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.sensors.dead_letter import JetStreamDeadLetterSensor

QUEUE = "queues/arguments.yaml"
PARAMS = {"name": "ada", "number": 3, "wait": "90s", "nothing": None, "word": "many"}


def publish(name: str, **arguments: Any) -> JetStreamPublishOperator:
    """Publish to a subject of the task's own."""
    return JetStreamPublishOperator(task_id=name, work_queue=QUEUE, subject=f"arguments.{name}", **arguments)


with DAG("argument_forms", schedule=None, params=PARAMS) as rendered:
    provision = JetStreamProvisionOperator(task_id="provision", work_queue=QUEUE)

    @task
    def size() -> int:
        """Return what a job of another task holds."""
        return 42

    @task
    def from_a_hook() -> bool:
        """Read the queue's file beside this one."""
        return JetStreamHook().check_drained(QUEUE).queue == "arguments"

    in_jobs = publish(
        "in_jobs",
        jobs=[
            Job(
                {"hello": "{{ params.name }}", "size": size()},
                subject="arguments.in_jobs.{{ params.name }}",
                id="{{ run_id }}-{{ params.number }}",
                headers={"Name": "{{ params.name }}"},
            ),
            Job("as it is: {0}", id="plain"),
        ],
    )
    mapped = JetStreamPublishOperator.partial(
        task_id="mapped",
        work_queue=QUEUE,
        subject="arguments.mapped",
        rate="{{ params.number }}",
    ).expand(jobs=[[Job("{{ params.name }} {{ ti.map_index }}")] for _ in range(2)])
    shown = JetStreamPublishOperator(
        task_id="shown",
        work_queue=WorkQueue.load(Path(__file__).with_name("queues") / "arguments.yaml"),
        jobs=[Job(b"text", subject="arguments.shown"), b"bytes", Job(b"\xff"), *(["x" * 100] * 1000)],
        subject="arguments.shown",
    )
    limits = publish(
        "limits",
        jobs=[],
        wait_for_completion=True,
        max_dead="{{ params.number }}",
        max_cancelled=" {{ params.number }} ",
        wait_timeout="{{ params.wait }}",
    )
    letters = JetStreamDeadLetterSensor(
        task_id="letters",
        work_queue=QUEUE,
        min_count="{{ params.number }}",
        older_than="{{ params.wait }}",
        timeout=1,
        poke_interval=1,
        soft_fail=True,
    )
    provision >> [in_jobs, mapped, shown, limits, letters, from_a_hook()]

with DAG("wrong_arguments", schedule=None, params=PARAMS, default_args={"retries": 3}) as wrong:
    waiting = {"wait_for_completion": True, "jobs": [b"one", b"two"]}
    publish("limit_is_no_number", **waiting | {"max_dead": "{{ params.word }}"})
    publish("limit_is_nothing", **waiting | {"max_dead": "{{ params.nothing }}"})
    publish("timeout_is_negative", **waiting | {"wait_timeout": "-{{ params.number }}"})
    publish("more_than_jobs", **waiting | {"min_completed": "{{ params.number }}"})
    publish("id_is_nothing", jobs=[Job(b"one"), Job(b"two", id="{{ params.nothing }}")])
    publish("subject_is_wrong", jobs=[Job(b"one"), Job(b"two", subject="{{ params.name }}.*")])
