"""The completion trigger at the moments at which Airflow starts and cancels it."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from airflow_steps import process_jobs, provisioned
from dags.waiting import queue as queue_of
from trigger_steps import LONG_AGO, completion_trigger, event_of, recreated

from airflow_provider_jetstream.jetstream import JobsHandle, Origin, take_cursor
from airflow_provider_jetstream.jetstream.contract import cancellation_filter
from airflow_provider_jetstream.jetstream.errors import JobError
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from testbed import seams
from testbed.dead_letters import stream_messages
from testbed.deferral import TaskDeferred
from testbed.queues import eventually, make_queue

if TYPE_CHECKING:
    from pytest_mock import MockerFixture

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from testbed.face import NatsPyConnection

pytestmark = pytest.mark.usefixtures("own_connections")


@pytest.fixture
async def queue(settings: ConnectionSettings, name: str) -> WorkQueue:
    return await provisioned(settings, queue_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("gap", [1, 4, 8, 12])
async def test_jobs_that_end_between_the_deferral_and_the_start_of_the_trigger_are_not_missed(
    connection: NatsPyConnection,
    settings: ConnectionSettings,
    queue: WorkQueue,
    gap: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL", "0")
    monkeypatch.setattr(seams.EARLY_FIRE_GUARD_SHORTEST_MARGIN, 0.0)
    monkeypatch.setattr(seams.EARLY_FIRE_GUARD_LONGEST_MARGIN, 0.5)
    trigger = await completion_trigger(connection, queue, 3, deferred_at=time.time() - gap)
    await process_jobs(settings, queue, 2)
    # Another trigger waits already, and has read all stored events.
    other = asyncio.create_task(event_of(await completion_trigger(connection, queue, 1)))
    running = asyncio.create_task(event_of(recreated(trigger)))
    await process_jobs(settings, queue, 2)
    assert (await running)["report"]["completed_sequences"] == [[1, 3]]
    assert (await other)["report"]["completed_sequences"] == [[4, 4]]


async def test_the_cancellation_of_jobs_outlives_the_trigger(
    connection: NatsPyConnection, queue: WorkQueue, mocker: MockerFixture
) -> None:
    requested = asyncio.Event()

    async def slow_answer(_: object) -> bool:
        requested.set()
        await asyncio.sleep(0.2)
        return True

    mocker.patch(seams.COMPLETION_HAS_ENDED, slow_answer)
    cursor = await take_cursor(connection, queue)
    jobs = await publish_with_ids(connection, queue, 3)
    trigger = await completion_trigger(
        connection, queue, 1, handle=JobsHandle(cursor=cursor, sequences=[(jobs[0], jobs[-1])]), cancel_on_kill=True
    )
    killing = asyncio.create_task(trigger.on_kill())
    await requested.wait()
    # Airflow cancels the trigger again each second.
    killing.cancel()
    await asyncio.wait([killing])
    assert killing.cancelled()

    async def all_are_cancelled() -> bool:
        return len(await stream_messages(connection, f"{queue.name}_events", cancellation_filter(queue.name))) == 3

    await eventually(all_are_cancelled)


async def publish_with_ids(connection: NatsPyConnection, queue: WorkQueue, count: int) -> list[int]:
    publish = connection.client.jetstream().publish
    return [(await publish(queue.name, b"", headers={"Job-Id": f"job-{number}"})).seq for number in range(count)]


async def test_a_trigger_finds_the_ends_that_workers_of_other_makes_report_by_the_handle(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"}, advisory_subjects=f"{name}-advisory.>")
    operator = JetStreamPublishOperator(
        task_id="t",
        work_queue=queue,
        jobs=[],
        subject=f"{name}.jobs.x",
        wait_for_completion=True,
        deferrable=True,
        defer_after=0,
    )
    origin = Origin("dag", "run", "t", max_tries=0)
    jobs = [{"id": job_id, "advisory": f"{name}-advisory.{job_id}"} for job_id in "ab"]
    _, handle = await operator._publish(connection, queue, jobs, origin)  # noqa: SLF001
    assert isinstance(handle, JobsHandle)
    assert len(handle.advised) == 2
    with pytest.raises(TaskDeferred) as deferral:
        operator.defer_waiting(handle, {})
    trigger = deferral.value.trigger
    assert f"{name}-advisory" not in json.dumps(trigger.serialize()[1]["handle"]["advised"])
    trigger.deferred_at = time.time() - LONG_AGO
    running = asyncio.create_task(event_of(recreated(trigger)))
    # They report and don't acknowledge yet, so nothing else can be known of these jobs.
    for job in jobs:
        await connection.client.publish(job["advisory"], json.dumps({"id": job["id"]}).encode())
    event = await running
    assert (event["status"], event["report"]["completed_sequences"]) == ("ended", [[1, 2]])
    # Another task can't wait for such a job, until the record of this one is closed.
    other = replace(origin, task_id="other")
    with pytest.raises(JobError, match="that dag/run/t awaits"):
        await operator._publish(connection, queue, jobs, other)  # noqa: SLF001
    await operator._close(connection, queue, origin, over=False)  # noqa: SLF001
    await operator._publish(connection, queue, jobs, other)  # noqa: SLF001
