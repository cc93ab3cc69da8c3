"""Every form of the operators' arguments for jobs and queues."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk import DAG, task

from airflow_provider_jetstream.jetstream import Consumer, Job, WorkQueue
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator

if TYPE_CHECKING:
    from collections.abc import Iterator

QUEUE = WorkQueue(
    name="forms",
    subjects=["forms.>"],
    consumers=[Consumer(name="worker", max_deliver=3)],
    dead_letters="forms_dead",
    events="forms_events",
)
FILE = str(Path(__file__).parent / "queues" / "templated.yaml")


def plain() -> Iterator[str]:
    """Yield jobs without a value of the context."""
    yield from ("plain-0", "plain-1")


def with_context(run_id: str, params: dict[str, Any], **context: Any) -> list[str]:
    """Make jobs from values of the context."""
    return [f"{context['ti'].task_id} in {run_id} with {params['colour']}"]


with DAG("publish_forms", schedule=None, params={"colour": "red"}) as forms:
    provision = JetStreamProvisionOperator(task_id="provision", work_queue=QUEUE)
    again = JetStreamProvisionOperator(task_id="provision_again", work_queue=QUEUE)

    @task
    def upstream() -> list[dict[str, Any]]:
        """Return jobs with their own id and advisory."""
        return [{"id": f"image-{number}", "advisory": "images.done", "size": number} for number in range(2)]

    def publish(name: str, **kwargs: Any) -> JetStreamPublishOperator:
        """Publish to a subject of the task's own."""
        return JetStreamPublishOperator(task_id=name, subject=f"forms.{name}", work_queue=QUEUE, **kwargs)

    forms_of_jobs = [
        publish("as_list", jobs=["text", b"\xff\x00", {"json": [1, None]}, 7]),
        publish("as_iterator", jobs=(f"generated-{number}" for number in range(3))),
        publish("as_callable", jobs=plain),
        publish("as_callable_with_context", jobs=with_context),
        publish("as_jobs", jobs=[Job("own subject", subject="forms.own", id="mine", headers={"Colour": "blue"})]),
        publish("as_nothing", jobs=[]),
    ]
    jobs = upstream()
    of_upstream = publish("as_upstream", jobs=jobs)
    provision >> again >> [*forms_of_jobs, jobs]

with DAG("templated", schedule=None, params={"queue": FILE, "conn": "nats_token"}) as templated:
    provision = JetStreamProvisionOperator(
        task_id="provision", work_queue="{{ params.queue }}", nats_conn_id="{{ params.conn }}"
    )
    publish_rendered = JetStreamPublishOperator(
        task_id="publish",
        work_queue="{{ params.queue }}",
        nats_conn_id="{{ params.conn }}",
        subject="templated.{{ dag.dag_id }}",
        jobs=["{{ run_id }}", {"id": "{{ task.task_id }}", "nested": ["{{ 1 + 1 }}"]}],
    )
    provision >> publish_rendered

with DAG("as_dict", schedule=None) as as_dict:
    declared = {
        "name": "as_{{ dag.dag_id }}",
        "subjects": "asdict",
        "consumers": [{"name": "worker", "max_deliver": 1}],
        "dead_letters": "as_dict_dead",
    }
    provision_dict = JetStreamProvisionOperator(task_id="provision", work_queue=declared)
    publish_dict = JetStreamPublishOperator(task_id="publish", work_queue=declared, subject="asdict", jobs=["one"])
    provision_dict >> publish_dict
