"""Tasks that plan, wait for room, keep to a rate, publish once for a key, and cancel."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise

from airflow.sdk import DAG

from airflow_provider_jetstream.jetstream import Consumer, Job, WorkQueue
from airflow_provider_jetstream.operators.cancel import JetStreamCancelOperator
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator

WORKER = Consumer(name="worker", max_deliver=1, ack_wait="1m")
CROWDED = WorkQueue(
    name="crowded", subjects=["crowded.>"], consumers=[WORKER], events="crowded_events", discard="new", max_msgs=2
)
# The storage of a stream can't be changed.
MOVED = WorkQueue(**CROWDED.model_dump(include={"name", "subjects"}), consumers=[WORKER], storage="memory")
DOOMED = WorkQueue(name="doomed", subjects=["doomed.>"], consumers=[WORKER], events="doomed_events", schedules=True)
# The server forgets the ids of jobs before another run comes.
ONCE = WorkQueue(name="once", subjects=["once.>"], consumers=[WORKER], events="once_events", duplicate_window="100ms")
CANCELLED = [Job(b"", id="b"), Job(b"", id="later", delay="1h")]

with DAG("authoring", schedule=None, params={"rate": 40, "room": "5m", "ids": ["a"]}):
    steps = [
        JetStreamProvisionOperator(task_id="plan_first", work_queue=CROWDED, dry_run=True),
        JetStreamProvisionOperator(task_id="provision", work_queue=CROWDED),
        JetStreamProvisionOperator(task_id="plan_again", work_queue=CROWDED, dry_run=True),
        JetStreamProvisionOperator(task_id="plan_moved", work_queue=MOVED, dry_run=True),
        JetStreamPublishOperator(
            task_id="crowd",
            work_queue=CROWDED,
            subject="crowded.a",
            jobs=[f"{number}" for number in range(12)],
            rate="{{ params.rate }}",
            room_timeout="{{ params.room }}",
        ),
    ]
    for before, after in pairwise(steps):
        before >> after

with DAG("cancelling", schedule=None, params={"ids": ["a"]}):
    provision = JetStreamProvisionOperator(task_id="provision", work_queue=DOOMED)
    doom = JetStreamPublishOperator(
        task_id="doom", work_queue=DOOMED, subject="doomed.a", jobs=[Job(b"", id="a"), *CANCELLED, b"without an id"]
    )
    provision >> doom
    doom >> [
        JetStreamCancelOperator(task_id="by_id", work_queue=DOOMED, job_ids="{{ params.ids }}", why="of {{ run_id }}"),
        JetStreamCancelOperator(task_id="by_job", work_queue=DOOMED, jobs=lambda: CANCELLED),
        JetStreamCancelOperator(
            task_id="by_sequence",
            work_queue=DOOMED,
            sequences="{{ ti.xcom_pull(task_ids='doom')['sequences'] }}",
            why="all of them",
        ),
    ]

with DAG("publish_once", schedule=None, params={"day": "2026-01-01"}):
    JetStreamPublishOperator(
        task_id="once",
        work_queue=ONCE,
        subject="once.a",
        jobs=[Job(b"", id=f"job-{number}") for number in range(3)],
        idempotency_key="{{ params.day }}",
        wait_for_completion=True,
        wait_timeout=timedelta(minutes=5),
        deferrable=True,
    )
