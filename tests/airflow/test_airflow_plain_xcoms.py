"""What tasks return is plain JSON, so that every backend of XComs, the page and a template show the same."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from airflow_steps import process_jobs
from dags.redrives import queue as queue_of

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream import Cursor, JobsHandle
from airflow_provider_jetstream.operators.cancel import JetStreamCancelOperator
from airflow_provider_jetstream.operators.consume import JetStreamConsumeOperator
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from airflow_provider_jetstream.sensors.dead_letter import JetStreamDeadLetterSensor
from airflow_provider_jetstream.sensors.jobs import JetStreamJobsSensor
from airflow_provider_jetstream.sensors.queue import JetStreamQueueDrainedSensor

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_provider_jetstream.jetstream import ConnectionSettings

pytestmark = pytest.mark.usefixtures("own_connections")


def assert_plain(value: Any) -> None:
    """Refuse what isn't exactly one of JSON's types."""
    assert type(value) in (dict, list, str, int, float, bool, type(None)), repr(value)
    if type(value) is dict:
        assert {type(name) for name in value} <= {str}
    for item in value.values() if type(value) is dict else value if type(value) is list else ():
        assert_plain(item)


async def returned(operator: Any) -> Any:
    """Return what a task returns, in a thread as tasks have no event loop."""
    task = SimpleNamespace(
        dag_id="dag", run_id="run", task_id=operator.task_id, map_index=-1, try_number=1, max_tries=0, start_date=None
    )
    result = await asyncio.to_thread(operator.execute, cast("Context", {"ti": task}))
    assert_plain(result)
    return result


async def test_what_every_operator_and_sensor_returns_is_plain_json(settings: ConnectionSettings, name: str) -> None:
    queue = queue_of(name)
    both: dict[str, Any] = {"work_queue": queue, "deferrable": False}
    planned = await returned(JetStreamProvisionOperator(task_id="plan", work_queue=queue, dry_run=True))
    assert planned["changes"]
    await returned(JetStreamProvisionOperator(task_id="provision", work_queue=queue))
    publish: dict[str, Any] = {**both, "subject": f"{name}.a"}
    assert (await returned(JetStreamPublishOperator(task_id="sent", jobs=["a", "b"], **publish)))["published"] == 2
    await process_jobs(settings, queue, 2, fail=True)
    letters = await returned(JetStreamDeadLetterSensor(task_id="letters", **both))
    assert letters["sequences"] == [[1, 2]]
    preview = await returned(JetStreamRedriveOperator(task_id="preview", dry_run=True, **both))
    assert preview["redriven"] == 2
    redriven = await returned(JetStreamRedriveOperator(task_id="redrive", **both))
    assert redriven["redriven"] == 2
    done = await returned(
        JetStreamConsumeOperator(task_id="consume", consumer=queue.consumers[0].name, handler=print, **both)
    )
    assert done["deliveries"] == 2
    for returns in ("counts", "jobs"):
        waiting = JetStreamPublishOperator(
            task_id=returns, jobs=["c"], wait_for_completion=True, returns=returns, **publish
        )
        running = asyncio.create_task(returned(waiting))
        await process_jobs(settings, queue, 1)
        await running
    handle = (await JetStreamHook().apublish(["d"], queue=queue, subject=f"{name}.a")).handle
    assert handle is not None
    assert_plain(handle)
    await process_jobs(settings, queue, 1)
    assert (await returned(JetStreamJobsSensor(task_id="jobs", handle=handle, deferrable=False)))["completed"] == 1
    await returned(JetStreamQueueDrainedSensor(task_id="drained", **both))
    await returned(JetStreamCancelOperator(task_id="cancel", work_queue=queue, job_ids=["nobody"]))


def test_a_handle_whose_jobs_are_stored_elsewhere_is_plain_json() -> None:
    cursor = Cursor("q", "2026-11-27T00:00:00Z", "e", 7, None, 1)
    stored = {"cursor": asdict(cursor), "key": "k", "parts": [[1, 2, "0" * 32]]}
    assert_plain(JobsHandle.of(stored).as_json())
