"""Tasks that can't succeed, one for each kind of error; the state says whether a retry may help.

What a DAG's file can show to be wrong fails its parsing; so what is wrong here is in files and templates.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG

from airflow_provider_jetstream.jetstream import Job
from airflow_provider_jetstream.operators.cancel import JetStreamCancelOperator
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from airflow_provider_jetstream.sensors.dead_letter import JetStreamDeadLetterSensor
from airflow_provider_jetstream.sensors.queue import JetStreamQueueDrainedSensor

GOOD: dict[str, Any] = {
    "name": "refusing",
    "subjects": ["refusing.>"],
    "consumers": [{"name": "worker", "max_deliver": 1}],
    "dead_letters": "refusing_dead",
    "events": "refusing_events",
}
# Known only when the task runs.
WITHOUT_EVENTS: dict[str, Any] = {**GOOD, "name": "{{ 'refusing' }}", "events": None}
# This queue exists.
WITHOUT_LETTERS: dict[str, Any] = {**GOOD, "name": "unlettered", "subjects": ["unlettered"], "dead_letters": None}
NO_LETTERS: dict[str, Any] = {**WITHOUT_LETTERS, "name": "{{ 'unlettered' }}"}
RETRY: dict[str, Any] = {"retries": 1, "retry_delay": timedelta(hours=1)}


def publish(name: str, **kwargs: Any) -> JetStreamPublishOperator:
    """Publish one job by default."""
    arguments = {"work_queue": GOOD, "subject": "refusing.one", "jobs": ["one"], **RETRY}
    return JetStreamPublishOperator(task_id=name, **{**arguments, **kwargs})


# Tasks that start at once, all of them at the beginning, leave other tests waiting for the lock of Airflow's sqlite.
with DAG("refusing", schedule=None, params={"files": "queues"}, max_active_tasks=4):
    for conn_id in (
        "nats_unreachable",
        "nats_wrong_password",
        "nats_wrong_token",
        "nats_without_jetstream",
        "nats_without_tls",
        "nats_secret_in_host",
        "nats_unknown_extra",
        "nats_two_ways",
        "nats_undefined",
    ):
        publish(conn_id, nats_conn_id=conn_id)
    JetStreamProvisionOperator(task_id="overlapping_filters", work_queue="{{ params.files }}/overlapping.yaml", **RETRY)
    JetStreamProvisionOperator(task_id="no_such_file", work_queue="{{ params.files }}/absent.yaml", **RETRY)
    JetStreamProvisionOperator(task_id="misspelt_field", work_queue="{{ params.files }}/misspelt.yaml", **RETRY)
    publish("unknown_stream")
    publish("unknown_stream_to_wait_for", wait_for_completion=True)
    publish("no_events_to_wait_for", wait_for_completion=True, work_queue=WITHOUT_EVENTS)
    publish("no_subject", subject=None, jobs=["{{ run_id }}"])
    publish("text_for_jobs", jobs="{{ 'one' }}")
    publish("nothing_for_jobs", jobs=lambda: None)
    publish("unserialisable_job", jobs=lambda: [{"when": object()}])
    publish("text_for_a_rate", rate="{{ 'fast' }}")
    publish("nothing_for_a_key", idempotency_key="{{ none }}")
    # A run without a logical date has none of these.
    publish("ds_for_a_key", idempotency_key="{{ ds }}")
    publish("no_date_in_a_key", idempotency_key="sales-{{ dag_run.logical_date }}")
    publish("ds_for_jobs", jobs=lambda ds: [ds])
    publish("ts_for_an_id", jobs=[Job("one", id="{{ ts_nodash }}")])
    publish("reserved_header", jobs=lambda: [Job("one", headers={"Nats-Msg-Id": "mine"})])
    JetStreamDeadLetterSensor(task_id="sensor_of_unknown_stream", work_queue=GOOD, deferrable=True, **RETRY)
    JetStreamDeadLetterSensor(task_id="sensor_of_no_dead_letters", work_queue=NO_LETTERS, **RETRY)
    # Airflow would skip them for any reason, and so hide that they can't work.
    for soft, deferrable in (("soft_sensor", False), ("soft_deferred_sensor", True)):
        JetStreamDeadLetterSensor(task_id=soft, work_queue=GOOD, soft_fail=True, deferrable=deferrable, **RETRY)
    JetStreamQueueDrainedSensor(task_id="drained_unknown_stream", work_queue=GOOD, deferrable=True, **RETRY)
    JetStreamQueueDrainedSensor(
        task_id="drained_unknown_consumer", work_queue=WITHOUT_LETTERS, consumers=["nobody"], **RETRY
    )
    JetStreamQueueDrainedSensor(
        task_id="drained_without_dead_letters", work_queue=NO_LETTERS, nothing_dead=True, **RETRY
    )
    JetStreamCancelOperator(task_id="cancel_of_unknown_stream", work_queue=GOOD, job_ids="a", **RETRY)
    JetStreamCancelOperator(task_id="cancel_without_ids", work_queue=GOOD, jobs=lambda: ["no id"], **RETRY)
    JetStreamCancelOperator(task_id="cancel_without_events", work_queue=WITHOUT_EVENTS, job_ids="a", **RETRY)
    JetStreamRedriveOperator(
        task_id="interval_for_a_selection", work_queue=GOOD, select={"run_id": "{{ data_interval_start }}"}, **RETRY
    )
    JetStreamRedriveOperator(task_id="redrive_of_unknown_stream", work_queue=GOOD, **RETRY)
