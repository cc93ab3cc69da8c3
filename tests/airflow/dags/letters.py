"""Sensors that wait for dead letters in every mode, and redrives."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal, TypeAlias

from airflow.sdk import DAG

from airflow_provider_jetstream.jetstream import Consumer, WorkQueue
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from airflow_provider_jetstream.sensors.dead_letter import JetStreamDeadLetterSensor

LETTERS = WorkQueue(
    name="letters",
    subjects=["letters"],
    consumers=[Consumer(name="worker", max_deliver=1, ack_wait="2s")],
    dead_letters="letters_dead",
    events="letters_events",
)
NO_LETTERS = WorkQueue(
    name="noletters",
    subjects=["noletters"],
    consumers=[Consumer(name="worker", max_deliver=1)],
    dead_letters="noletters_dead",
)
ABANDONED = WorkQueue(
    name="abandoned",
    subjects=["abandoned"],
    consumers=[Consumer(name="worker", max_deliver=1, ack_wait="2s")],
    dead_letters="abandoned_dead",
)

with DAG("abandoned", schedule=None):
    JetStreamDeadLetterSensor(
        task_id="sense",
        work_queue=ABANDONED,
        select={"consumer": "worker"},
        min_count=3,
        older_than="2s",
        group_by=["consumer"],
        poke_interval=1,
        timeout=120,
        deferrable=True,
    )

Mode: TypeAlias = Literal["poke", "reschedule"]
MODES: tuple[tuple[str, bool, Mode, int], ...] = (
    ("deferred", True, "poke", 1),
    ("poking", False, "poke", 1),
    # Airflow fails a task that is due again before it has seen the end of the process that rescheduled it.
    ("rescheduled", False, "reschedule", 5),
)
with DAG("letters", schedule=None):
    sensors = [
        JetStreamDeadLetterSensor(
            task_id=name, work_queue=LETTERS, poke_interval=interval, timeout=120, deferrable=deferrable, mode=mode
        )
        for name, deferrable, mode, interval in MODES
    ]
    two = JetStreamDeadLetterSensor(
        task_id="deferred_for_two", work_queue=LETTERS, min_count=2, poke_interval=1, timeout=120, deferrable=True
    )
    at_once = JetStreamDeadLetterSensor(
        task_id="at_once",
        work_queue=LETTERS,
        min_count=2,
        count_under_pause="{{ true }}",
        poke_interval=1,
        timeout=120,
        deferrable=True,
    )
    redrive = JetStreamRedriveOperator(
        task_id="redrive",
        work_queue=LETTERS,
        count_under_pause="{{ ti.task_id == 'redrive' }}",
        wait_for_completion=True,
        wait_timeout=timedelta(minutes=5),
        deferrable=True,
    )
    nothing_left = JetStreamRedriveOperator(
        task_id="nothing_left", work_queue=LETTERS, wait_for_completion=True, deferrable=True
    )
    [*sensors, two] >> at_once >> redrive >> nothing_left

with DAG("no_letters", schedule=None):
    provision = JetStreamProvisionOperator(task_id="provision", work_queue=NO_LETTERS)
    provision >> [
        JetStreamDeadLetterSensor(
            task_id=name, work_queue=NO_LETTERS, poke_interval=1, timeout=3, deferrable=True, soft_fail=soft
        )
        for name, soft in (("skipped", True), ("failed", False))
    ]
