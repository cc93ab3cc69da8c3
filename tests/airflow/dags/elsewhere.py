"""Jobs that are published in one task and awaited in another, and waits that nobody could end."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, task

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream import Consumer, Job, WorkQueue
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.sensors.jobs import JetStreamJobsSensor
from airflow_provider_jetstream.sensors.queue import JetStreamQueueDrainedSensor

MODES: dict[str, dict[str, Any]] = {
    "deferred": {"deferrable": True},
    "poking": {"deferrable": False},
    # Airflow fails a task that is due again before it has seen the end of the process that rescheduled it.
    "rescheduled": {"deferrable": False, "mode": "reschedule", "poke_interval": 5, "defer_after": 0},
}
# A try that must not come would come so late.
RETRY: dict[str, Any] = {"retries": 1, "retry_delay": timedelta(hours=1)}
ENDLESS = ("overdue", "overdue_sensor", "untaken", "deleted", "anew", "unwanted")


def queue(name: str) -> WorkQueue:
    """Declare a queue whose consumer takes some of its jobs, each once."""
    return WorkQueue(
        name=name,
        subjects=[f"{name}.>"],
        consumers=[Consumer(name="worker", filter_subject=f"{name}.taken", max_deliver=1, ack_wait="10m")],
        dead_letters=f"{name}_dead",
        events=f"{name}_events",
    )


def jobs(name: str, count: int = 3) -> list[Job]:
    """Return jobs with ids."""
    return [Job(f"{name}-{number}", id=f"{name}-{number}") for number in range(count)]


def waits(name: str, *, kind: str = "taken", **arguments: Any) -> None:
    """Publish jobs to the queue of the same name, and wait for them for a day."""
    JetStreamPublishOperator(
        task_id=name,
        work_queue=queue(name),
        subject=f"{name}.{kind}",
        jobs=jobs(name),
        wait_for_completion=True,
        deferrable=True,
        **{"retries": 0, **arguments},
    )


with DAG("elsewhere", schedule=None):
    publish = JetStreamPublishOperator(
        task_id="publish", work_queue=queue("elsewhere"), subject="elsewhere.taken", jobs=jobs("a")
    )

    @task(retries=0)
    def publish_by_hook() -> dict[str, Any]:
        """Publish as functions do, and return the handle on these jobs only."""
        hook = JetStreamHook()
        report = hook.publish(jobs("b"), subject="elsewhere.taken", queue=queue("elsewhere"))
        assert report.handle is not None
        return report.handle

    @task(retries=0)
    def wait_by_hook(handle: dict[str, Any]) -> int:
        """Wait as functions do."""
        return len(JetStreamHook().wait(handle, wait_timeout="10m").completed)

    JetStreamJobsSensor(task_id="sensor", handle=publish.output, deferrable=True, retries=0)
    JetStreamJobsSensor(
        task_id="blocking_sensor", handle="{{ ti.xcom_pull('publish') }}", deferrable=False, retries=0
    ).set_upstream(publish)
    by_hook = publish_by_hook()
    wait_by_hook(by_hook)  # type: ignore[arg-type]
    JetStreamJobsSensor(task_id="sensor_of_hook", handle=by_hook, deferrable=True, retries=0)
    JetStreamJobsSensor(
        task_id="rescheduled_sensor",
        handle=publish.output,
        mode="reschedule",
        poke_interval=5,
        defer_after=0,
        deferrable=False,
        retries=0,
    )

# The handle of another DAG's run.
with DAG("elsewhere_still", schedule=None):
    JetStreamJobsSensor(
        task_id="other_dag",
        handle="{{ dag_run.conf['handle'] }}",
        reconcile="{{ dag_run.conf['minutes'] }}m",
        timeout=timedelta(minutes=10),
        deferrable=True,
        retries=0,
    )

# Jobs that nobody does, and jobs that die: in each mode a sensor that fails, and one that is skipped.
with DAG("elsewhere_over", schedule=None):
    for name, mode in MODES.items():
        for ends, limit in (("late", 3), ("died", 900)):
            for suffix, soft in (("", False), ("_soft", True)):
                JetStreamJobsSensor(
                    task_id=f"{name}_{ends}{suffix}",
                    handle=f"{{{{ dag_run.conf['{ends}'] }}}}",
                    timeout=limit,
                    soft_fail=soft,
                    cancel_on_failure=name == "deferred" and ends == "late" and not soft,
                    **RETRY,
                    **mode,
                )

with DAG("endless", schedule=None):
    waits("overdue", execution_timeout=timedelta(seconds=10))
    JetStreamQueueDrainedSensor(
        task_id="overdue_sensor",
        work_queue=queue("overdue_sensor"),
        execution_timeout=timedelta(seconds=10),
        deferrable=True,
        retries=1,
        retry_delay=timedelta(hours=1),
    )
    waits("untaken", kind="nobody", reconcile=1, retries=1, retry_delay=timedelta(hours=1))
    waits("deleted", reconcile="1s", retries=1, retry_delay=timedelta(hours=1))
    waits("anew", retries=1, retry_delay=timedelta(hours=1))
    waits("unwanted", cancel_on_failure=True)
