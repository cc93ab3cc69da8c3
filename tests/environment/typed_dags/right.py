"""A DAG of which type checkers refuse nothing: the arguments that templates, other tasks and modes allow."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, AssetWatcher, task

from airflow_provider_jetstream.assets.stream_asset import dead_letter_asset, queue_asset
from airflow_provider_jetstream.jetstream import DeadLetter, Job, Repair, Selection, StopWhen, WorkQueue
from airflow_provider_jetstream.notifications.jetstream import JetStreamNotifier
from airflow_provider_jetstream.operators.cancel import JetStreamCancelOperator
from airflow_provider_jetstream.operators.consume import JetStreamConsumeOperator, jetstream_consume_task
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from airflow_provider_jetstream.operators.spark import JetStreamDeadLetterReportOperator
from airflow_provider_jetstream.sensors.dead_letter import JetStreamDeadLetterSensor
from airflow_provider_jetstream.sensors.jobs import JetStreamJobsSensor
from airflow_provider_jetstream.sensors.queue import JetStreamQueueDrainedSensor
from airflow_provider_jetstream.triggers.dead_letter import DeadLetterTrigger
from airflow_provider_jetstream.triggers.message import JetStreamMessageTrigger
from airflow_provider_jetstream.worker import Delivery  # noqa: TC001 - as authors import it

QUEUE = WorkQueue(
    name="emails",
    subjects=["emails.>"],
    consumers=[{"name": "sender", "filter_subject": "emails.>", "max_deliver": 3}],
    events="emails_events",
    dead_letters="emails_dead",
)
HANDLE = "{{ ti.xcom_pull('publish') }}"
RARELY: dict[str, Any] = {"retries": 3, "pool": "emails"}


def send(delivery: Delivery) -> None:
    """Handle a message."""
    delivery.progress(0.5, "half of it")


def corrected(letter: DeadLetter) -> Repair | None:
    """Repair a dead letter."""
    return Repair(body=b"{}") if letter.subject else None


def repaired(letters: Any) -> Any:
    """Repair letters with Spark."""
    return letters


with DAG("right", default_args={"deferrable": True}, schedule=None):

    @task
    def jobs() -> list[dict[str, Any]]:
        """Return jobs."""
        return [{"id": "a"}]

    @task
    def batches() -> list[list[dict[str, Any]]]:
        """Return jobs for each mapped task."""
        return [[{"id": "a"}], [{"id": "b"}]]

    JetStreamProvisionOperator(task_id="provision", work_queue=Path("/queues/emails.yaml"), dry_run=True, **RARELY)
    publish = JetStreamPublishOperator(task_id="publish", work_queue=QUEUE, jobs=jobs(), subject="emails.a", rate=5)
    JetStreamPublishOperator(
        task_id="wait",
        work_queue="emails.yaml",
        jobs=[Job({"to": "ada"}, id="ada", unique="ada"), Job(1, partition_key="a", delay="10m"), "text", b"bytes"],
        subject="emails.{{ params.kind }}",
        job_id="id",
        wait_for_completion=True,
        max_dead=None,
        max_cancelled="{{ params.cancelled }}",
        wait_timeout="2h",
        reconcile=timedelta(minutes=1),
        on_stall="wait",
        returns="jobs",
        on_failure_callback=[JetStreamNotifier(subject="events.failed", queue=QUEUE, diagnose=QUEUE)],
        execution_timeout=timedelta(hours=1),
        trigger_rule="all_done",
    )
    JetStreamPublishOperator(
        task_id="any", work_queue=QUEUE, jobs=lambda ds: [ds], wait_for_completion=True, min_completed=1
    )
    mapped = JetStreamPublishOperator.partial(
        task_id="mapped", work_queue=QUEUE, subject="emails.a", wait_for_completion=True, min_completed=1, retries=2
    ).expand(jobs=batches())
    JetStreamJobsSensor(task_id="ended", handle=publish.output, timeout=3_600, mode="reschedule", soft_fail=True)
    JetStreamJobsSensor(task_id="one_ended", handle=HANDLE, min_completed=1, deferrable=True, cancel_on_kill=True)
    JetStreamDeadLetterSensor(
        task_id="dead",
        work_queue=QUEUE,
        select=Selection(error_class="app.BusyError"),
        min_count="{{ params.count }}",
        older_than="10m",
        group_by=["reason", "fingerprint"],
        poke_interval=timedelta(minutes=1),
        exponential_backoff=True,
        max_wait=600,
        silent_fail=True,
    )
    JetStreamQueueDrainedSensor(task_id="drained", work_queue=QUEUE, consumers=["sender"], never_fail=True)
    JetStreamRedriveOperator(task_id="all", work_queue=QUEUE)
    JetStreamRedriveOperator(
        task_id="redrive",
        work_queue=QUEUE,
        select={"reasons": ["terminated"]},
        transform=corrected,
        protocol="copy",
        wait_for_completion=True,
        max_dead=5,
    )
    JetStreamRedriveOperator(task_id="one", work_queue=QUEUE, wait_for_completion=True, min_completed=1)
    JetStreamRedriveOperator(task_id="waves", work_queue=QUEUE, waves=[10, "rest"], stop_when=StopWhen(died_again=0.1))
    JetStreamRedriveOperator(task_id="discard", work_queue=QUEUE, discard=True, why="a reason", dry_run=True)
    JetStreamRedriveOperator(task_id="apply_policy", work_queue=QUEUE, discard="by_policy")
    JetStreamRedriveOperator(task_id="undo", work_queue=QUEUE, undo="{{ ti.xcom_pull('discard')['redrive'] }}")
    JetStreamRedriveOperator(task_id="keyed", work_queue=QUEUE, order_key="header:Customer", wait_timeout="1h")
    JetStreamRedriveOperator(
        task_id="spark",
        work_queue=QUEUE,
        engine="spark",
        repair=repaired,
        directory="/shared",
        spark_conf={"spark.executor.memory": "2g"},
        wait_for_completion=True,
        max_dead=5,
    )
    JetStreamRedriveOperator(task_id="spark_waves", work_queue=QUEUE, engine="spark", waves=[10, "rest"])
    JetStreamCancelOperator(task_id="by_id", work_queue=QUEUE, job_ids=["ada", 7])
    JetStreamCancelOperator(task_id="by_job", work_queue=QUEUE, jobs=[{"id": "ada"}], why="a reason")
    JetStreamCancelOperator(task_id="by_sequence", work_queue=QUEUE, sequences=[[1, 5]])
    JetStreamConsumeOperator(task_id="consume", work_queue=QUEUE, consumer="sender", handler=send, max_messages=10)
    JetStreamDeadLetterReportOperator(task_id="report", work_queue=QUEUE, directory="/reports", select="{{ params.s }}")

    @jetstream_consume_task(work_queue=QUEUE, consumer="sender", batch=10)
    def send_all(deliveries: list[Delivery], sender: str) -> list[None]:
        """Handle messages."""
        return [None for _ in deliveries if sender]

    send_all("ada@example.org")

queue_asset(
    QUEUE,
    group="emails",
    watchers=[
        AssetWatcher(name="doorbell", trigger=JetStreamMessageTrigger(work_queue=QUEUE, consumer="sender", interval=5)),
        AssetWatcher(
            name="payload",
            trigger=JetStreamMessageTrigger(work_queue=QUEUE, consumer="sender", mode="payload", body="json"),
        ),
    ],
)
dead_letter_asset(QUEUE, watchers=[AssetWatcher(name="dead", trigger=DeadLetterTrigger(work_queue=QUEUE))])
