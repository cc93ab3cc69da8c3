"""Redrives that are killed, stopped, templated, cleared or mapped; these need a real Airflow."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG

from airflow_provider_jetstream.jetstream import Consumer, WorkQueue
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from airflow_provider_jetstream.sensors.dead_letter import JetStreamDeadLetterSensor

LETTERS = 12


def queue(name: str) -> WorkQueue:
    """Declare a queue in which a job is delivered once."""
    return WorkQueue(
        name=name,
        subjects=[f"{name}.>"],
        consumers=[Consumer(name="worker", max_deliver=1, ack_wait="1s")],
        dead_letters=f"{name}_dead",
        events=f"{name}_events",
    )


def redrive(name: str, **kwargs: Any) -> JetStreamRedriveOperator:
    """Redrive the dead letters of the queue of the same name."""
    return JetStreamRedriveOperator(task_id=name, **{"work_queue": queue(name), **kwargs})


WAITING: dict[str, Any] = {
    "wait_for_completion": True,
    "wait_timeout": timedelta(minutes=5),
    "deferrable": True,
    "retries": 3,
    "retry_delay": timedelta(seconds=1),
}

# Its process is killed in the middle; its retry is fast, so that the test sees it wait.
with DAG("cut_off", schedule=None):
    redrive("cut_off", rate="{{ 2 if ti.try_number == 1 else 1000 }}", why="{{ run_id }}", **WAITING)

# A person marks it as failed in the middle.
with DAG("marked_failed", schedule=None):
    redrive("marked_failed", rate=1, retries=0)

# All arguments are rendered as text.
with DAG("as_text", schedule=None, params={"rate": "50", "most": "3", "subject": "as_text.again"}):
    sense = JetStreamDeadLetterSensor(
        task_id="sense",
        work_queue=queue("as_text"),
        select={"subject": "{{ params.subject.replace('again', '*') }}"},
        group_by=["subject", "error_class"],
        poke_interval=1,
        timeout=60,
    )
    text = redrive(
        "as_text",
        select="{{ {'error_class': 'ValueError'} }}",
        sequences="{{ ti.xcom_pull('sense')['sequences'] }}",
        rate="{{ params.rate }}",
        max_redrives="{{ params.most }}",
        subject="{{ params.subject }}",
        why="{{ dag.dag_id }}",
    )
    sense >> text

# Its letters are changed by a patch, whose values are rendered.
with DAG("patched", schedule=None, params={"currency": "EUR"}):
    redrive("patched", patch=[{"op": "replace", "path": "/currency", "value": "{{ params.currency }}"}], retries=0)

# It is cleared after it succeeded.
with DAG("cleared", schedule=None):
    redrive("cleared", **WAITING)

# Each mapped instance redrives other letters.
with DAG("by_index", schedule=None):
    JetStreamRedriveOperator.partial(
        task_id="by_index", work_queue=queue("by_index"), transform=lambda _: None, max_redrives=2
    ).expand(sequences=[[1], "[2]", [[3, 4]]])
