"""``execute({})``, as unit tests of DAGs call it: it works where a task needs no identity, else the error says so."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from airflow_steps import process_jobs
from dags.waiting import queue as queue_of

from airflow_provider_jetstream.airflow_compat import AirflowFailException
from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream import WorkQueue
from airflow_provider_jetstream.jetstream.errors import ArgumentError
from airflow_provider_jetstream.operators.cancel import JetStreamCancelOperator
from airflow_provider_jetstream.operators.consume import JetStreamConsumeOperator
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from airflow_provider_jetstream.operators.spark import JetStreamDeadLetterReportOperator
from airflow_provider_jetstream.sensors.dead_letter import JetStreamDeadLetterSensor
from airflow_provider_jetstream.sensors.jobs import JetStreamJobsSensor
from airflow_provider_jetstream.sensors.queue import JetStreamQueueDrainedSensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow_provider_jetstream.jetstream import ConnectionSettings

pytestmark = pytest.mark.usefixtures("own_connections")

QUEUE = queue_of("minimal")
# They write the task's identity into jobs, audit records and cancellations.
NEEDING = {
    "publish": lambda: JetStreamPublishOperator(task_id="t", work_queue=QUEUE, jobs=["a"], subject="minimal"),
    "consume": lambda: JetStreamConsumeOperator(task_id="t", work_queue=QUEUE, consumer="worker", handler=print),
    "cancel": lambda: JetStreamCancelOperator(task_id="t", work_queue=QUEUE, job_ids=["a"]),
    "redrive": lambda: JetStreamRedriveOperator(task_id="t", work_queue=QUEUE),
    "preview": lambda: JetStreamRedriveOperator(task_id="t", work_queue=QUEUE, dry_run=True),
    "report": lambda: JetStreamDeadLetterReportOperator(task_id="t", work_queue=QUEUE, directory="/nowhere"),
}


@pytest.mark.parametrize("make", NEEDING.values(), ids=NEEDING)
def test_a_task_that_needs_its_identity_says_what_its_context_lacks(make: Callable[[], Any]) -> None:
    with pytest.raises((ArgumentError, AirflowFailException), match="task instance as ti, found none: run the task"):
        make().execute({})


async def test_provisioning_and_sensors_need_no_task_instance(settings: ConnectionSettings, name: str) -> None:
    queue = queue_of(name)

    async def executed(operator: Any) -> Any:
        return await asyncio.to_thread(operator.execute, {})

    assert f"create stream {name}" in await executed(JetStreamProvisionOperator(task_id="t", work_queue=queue))
    report = await JetStreamHook().apublish(["a"], queue=queue, subject=name)
    waiting = asyncio.create_task(executed(JetStreamJobsSensor(task_id="t", handle=report)))
    await process_jobs(settings, queue, 1)
    assert (await waiting)["completed"] == 1
    drained = JetStreamQueueDrainedSensor(task_id="t", work_queue=queue, deferrable=False)
    assert (await executed(drained))["drained"] is True
    await JetStreamHook().apublish(["b"], queue=queue, subject=name)
    await process_jobs(settings, WorkQueue.load(queue), 1, fail=True)
    letters = JetStreamDeadLetterSensor(task_id="t", work_queue=queue, deferrable=False)
    assert (await executed(letters))["sequences"] == [[2, 2]]
