"""Redrives in waves, which hold no worker slot while jobs or people are awaited; these need a real Airflow."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG

from airflow_provider_jetstream.jetstream import Consumer, WorkQueue
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator

PROOF = "waves_proof"
STEERED = ("waves_paused", "waves_aborted")


def queue(name: str) -> WorkQueue:
    """Declare a queue in which a job is delivered once, to workers that may be slow."""
    return WorkQueue(
        name=name,
        subjects=[f"{name}.>"],
        consumers=[Consumer(name="worker", max_deliver=1, ack_wait="5s", max_ack_pending=2_000)],
        dead_letters=f"{name}_dead",
        events=f"{name}_events",
    )


WAVES: dict[str, list[int | str]] = {PROOF: [10, 100, "rest"], **{name: [5, "rest"] for name in STEERED}}
for dag_id, waves in WAVES.items():
    with DAG(dag_id, schedule=None):
        JetStreamRedriveOperator(
            task_id="redrive",
            work_queue=queue(dag_id),
            waves=waves,
            why="ticket 4711",
            wait_timeout=timedelta(minutes=30),
            deferrable=True,
        )
