"""System test in the form of Airflow's own providers: one DAG with set-up, body, tear-down and watcher.

It needs a server with JetStream behind the connection ``nats_default``, and an Airflow whose database is migrated::

    AIRFLOW_CONN_NATS_DEFAULT=nats://127.0.0.1:4222 pytest tests/system/jetstream/example_work_queue.py

A plain ``pytest tests`` doesn't collect it: its name is that of an example.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import Any

from airflow.sdk import DAG, task

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from airflow_provider_jetstream.sensors.dead_letter import JetStreamDeadLetterSensor

ENV_ID = os.environ.get("SYSTEM_TESTS_ENV_ID", "default")
DAG_ID = "example_jetstream_work_queue"
NAME = f"system-{ENV_ID}"
QUEUE: dict[str, Any] = {
    "name": NAME,
    "subjects": [f"{NAME}.>"],
    "consumers": [{"name": "worker", "max_deliver": 1, "ack_wait": "1s"}],
    "dead_letters": f"{NAME}-dead",
    "events": f"{NAME}-events",
}


async def _terminate(connection: Any) -> None:
    subscription = await connection.client.jetstream().pull_subscribe("", durable="worker", stream=NAME)
    for message in await subscription.fetch(2, timeout=10):
        await message.term()


async def _remove(connection: Any) -> None:
    for stream in (NAME, f"{NAME}-dead", f"{NAME}-events"):
        await connection.client.jetstream().delete_stream(stream)


with DAG(DAG_ID, schedule="@once", start_date=datetime(2026, 1, 1, tzinfo=UTC), catchup=False, tags=["example"]) as dag:
    # Set-up.
    provision = JetStreamProvisionOperator(task_id="provision", work_queue=QUEUE)

    # Body.
    publish = JetStreamPublishOperator(task_id="publish", work_queue=QUEUE, subject=f"{NAME}.x", jobs=["a", "b"])

    @task
    def terminate() -> None:
        """Let all jobs die."""
        JetStreamHook().blocking(_terminate)

    letters = JetStreamDeadLetterSensor(task_id="letters", work_queue=QUEUE, min_count=2, poke_interval=1, timeout=60)
    redrive = JetStreamRedriveOperator(task_id="redrive", work_queue=QUEUE)

    # Tear-down.
    @task(trigger_rule="all_done")
    def remove() -> None:
        """Remove the queue."""
        JetStreamHook().blocking(_remove)

    # Fails the run where a task before the tear-down failed.
    @task(trigger_rule="one_failed", retries=0)
    def watcher() -> None:
        """Fail."""
        raise RuntimeError("a task of the body failed")

    body = [provision, publish, terminate(), letters, redrive]
    for earlier, later in zip(body, [*body[1:], remove()], strict=True):
        earlier >> later
    body >> watcher()


def test_run() -> None:
    """Run the DAG in this process."""
    run = dag.test()
    assert run.state == "success", run
