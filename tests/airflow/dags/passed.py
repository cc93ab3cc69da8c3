"""Objects of the package as results of tasks; a redrive whose jobs die again."""

from __future__ import annotations

from typing import Any

from airflow.sdk import DAG, task

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream import Consumer, Job, Selection, WorkQueue
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from airflow_provider_jetstream.sensors.jobs import JetStreamJobsSensor

QUEUE: dict[str, Any] = {
    "name": "passed",
    "subjects": ["passed.>"],
    "consumers": [{"name": "worker", "filter_subject": "passed.>", "ack_wait": "1s", "max_deliver": 1}],
    "dead_letters": "passed_dead",
    "events": "passed_events",
}
DYING: dict[str, Any] = {
    **QUEUE,
    "name": "passed_dying",
    "subjects": ["passed_dying"],
    "consumers": [{"name": "worker", "ack_wait": "1s", "max_deliver": 1}],
    "dead_letters": "passed_dying_dead",
    "events": "passed_dying_events",
}
JOBS = [Job({"n": 1}, id="one"), Job(b"\xff", id="two", headers={"A": "b"})]
SELECTION = Selection(consumer="worker", reasons=["terminated"])

with DAG("passed", schedule=None, default_args={"retries": 0}):

    @task
    def make_queue() -> WorkQueue:
        """Return a queue."""
        return WorkQueue(**QUEUE)

    @task
    def make_jobs() -> list[Job]:
        """Return jobs."""
        return JOBS

    @task
    def make_others() -> dict[str, Any]:
        """Return objects within a dict."""
        return {"selection": SELECTION, "consumer": Consumer(name="w", max_deliver=3)}

    @task
    def compare(queue: Any, jobs: Any, others: Any) -> None:
        """Fail unless the objects are equal."""
        assert queue == WorkQueue(**QUEUE)
        assert jobs == JOBS
        assert others == {"selection": SELECTION, "consumer": Consumer(name="w", max_deliver=3)}

    @task
    def publish_by_hook(queue: Any, jobs: Any) -> Any:
        """Return the report of a publish."""
        return JetStreamHook().publish(jobs, subject="passed.hook", queue=queue)

    @task
    def scan(queue: Any) -> Any:
        """Return what a scan found."""
        return JetStreamHook().find_dead_letters(queue)

    made_queue: Any = make_queue()
    made_jobs: Any = make_jobs()
    provision = JetStreamProvisionOperator(task_id="provision", work_queue=made_queue)
    publish = JetStreamPublishOperator(task_id="publish", work_queue=made_queue, subject="passed.a", jobs=made_jobs)
    report = publish_by_hook(made_queue, made_jobs)
    wait = JetStreamJobsSensor(task_id="wait", handle=report, timeout=300)
    compare(made_queue, made_jobs, make_others())
    provision >> [publish, report]
    provision >> scan(made_queue)

with DAG("died_again", schedule=None, default_args={"retries": 0}):
    (
        JetStreamProvisionOperator(task_id="provision", work_queue=DYING)
        >> JetStreamPublishOperator(
            task_id="publish",
            work_queue=DYING,
            subject="passed_dying",
            jobs=[{"do": "give up"}],
            wait_for_completion=True,
            max_dead=None,
            deferrable=False,
        )
        >> JetStreamRedriveOperator(
            task_id="redrive",
            work_queue=DYING,
            select={"dag_id": "died_again", "run_id": "{{ run_id }}"},
            wait_for_completion=True,
            max_dead=None,
            deferrable=False,
        )
    )
