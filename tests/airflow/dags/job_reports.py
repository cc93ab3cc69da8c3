"""Tasks whose jobs are reported one by one, and tasks that are mapped over the reports, also after a failure."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, get_current_context, task

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream import Consumer, Job, WorkQueue
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator

MANY = 2_100


def queue(name: str) -> WorkQueue:
    """Declare a queue in which a job is delivered once."""
    return WorkQueue(
        name=name,
        subjects=[name],
        consumers=[Consumer(name="worker", max_deliver=1, ack_wait="30s")],
        dead_letters=f"{name}_dead",
        events=f"{name}_events",
        duplicate_window="100ms",
    )


def waits(name: str, *, count: int, **arguments: Any) -> JetStreamPublishOperator:
    """Publish jobs to the queue of the same name, and wait for them in the triggerer."""
    return JetStreamPublishOperator(
        task_id=name,
        work_queue=queue(name),
        subject=name,
        jobs=[Job({"row": number}, id=f"{name}-{number}") for number in range(count)],
        wait_for_completion=True,
        wait_timeout=timedelta(minutes=10),
        deferrable=True,
        **arguments,
    )


with DAG("job_reports", schedule=None):
    failing = waits("reported_dead", count=7, max_dead=6)
    acknowledged = waits("reported_acks", count=3, returns="jobs")
    many = waits("reported_parts", count=MANY, returns="jobs")

    @task(trigger_rule="all_done")
    def dead_jobs() -> list[dict[str, Any]]:
        """Return the jobs of the failed task that are dead letters."""
        reports = get_current_context()["ti"].xcom_pull("reported_dead", key="job_reports")
        return JetStreamHook().job_reports(reports, states=["dead"])

    @task
    def treat(job: dict[str, Any]) -> str:
        """Return what a mapped task knows of its job."""
        return f"{job['id']} {job['error_class']}"

    @task
    def count(part: dict[str, Any]) -> int:
        """Return how many jobs a part has."""
        return len({job["id"] for job in JetStreamHook().job_reports(part, states=["completed"])})

    found = dead_jobs()
    failing >> found
    treat.override(task_id="treat_dead").expand(job=found)
    treat.override(task_id="treat_acknowledged").expand(job=acknowledged.output)
    count.expand(part=many.output)

with DAG("hook_publishing", schedule=None):

    @task(retries=1, retry_delay=timedelta(seconds=1))
    def publishing_twice() -> list[int]:
        """Publish two lists with a job in common; the first try fails after the first list, the second sorts it."""
        hook, is_retry = JetStreamHook(), get_current_context()["ti"].try_number > 1
        target: dict[str, Any] = {"subject": "hooked", "queue": queue("hooked")}
        bodies = ["a", "b", "c"] if is_retry else ["c", "a", "b"]
        first = hook.publish(bodies, **target)
        if not is_retry:
            raise RuntimeError("the first try fails")
        second = hook.publish(["a"], **target)
        return [first.duplicates, second.duplicates]

    publishing_twice()
