"""The log of a task says what it has published before it waits, and goes on saying how far the jobs are."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from airflow_steps import process_jobs, provisioned
from dags.waiting import queue as queue_of
from trigger_steps import completion_trigger

from airflow_provider_jetstream.jetstream import JobsHandle
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from testbed import seams
from testbed.deferral import TaskDeferred
from testbed.queues import eventually

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.face import NatsPyConnection

pytestmark = pytest.mark.usefixtures("own_connections")


def context() -> Context:
    task = SimpleNamespace(dag_id="dag", run_id="run", task_id="publish", map_index=-1, try_number=1, max_tries=0)
    return cast("Context", {"ti": task})


def logged(monkeypatch: pytest.MonkeyPatch, task: Any) -> list[str]:
    """Return the lines that a task or a trigger logs from now on."""
    lines: list[str] = []
    monkeypatch.setattr(task.log, "info", lambda text, *values: lines.append(text % values))
    return lines


@pytest.mark.parametrize("deferrable", [False, True])
async def test_what_is_published_is_logged_before_the_wait_and_the_wait_logs_its_progress(
    settings: ConnectionSettings, name: str, monkeypatch: pytest.MonkeyPatch, *, deferrable: bool
) -> None:
    monkeypatch.setattr(seams.JOB_REPORTS_PROGRESS_SECONDS, 0.05)
    queue = await provisioned(settings, queue_of(name))
    short: dict[str, Any] = {"defer_after": "500ms"} if deferrable else {}
    operator = JetStreamPublishOperator(
        task_id="publish",
        work_queue=queue,
        subject=name,
        jobs=["a", "b", "c"],
        wait_for_completion=True,
        deferrable=deferrable,
        **short,
    )
    lines = logged(monkeypatch, operator)
    running = asyncio.create_task(asyncio.to_thread(operator.execute, context()))
    await eventually(lambda: [line for line in lines if "3 to go" in line])
    published, waiting, progress = lines[:3]
    assert published == f"3 jobs are stored in {name}, from sequence 1 to 3 (0 were already)"
    assert waiting.startswith(f"Waiting for 3 jobs of {name} (sequences 1-3) for 1 day, 0:00:00 at most; another task")
    handle = JobsHandle.of(waiting.partition(" by the handle ")[2])
    assert (handle.cursor.queue, handle.sequences) == (name, [(1, 3)])
    assert progress == ("Waiting for jobs: 0 completed, 0 dead, 0 cancelled, 0 unaccounted for, 3 to go")
    if deferrable:
        with pytest.raises(TaskDeferred):
            await running
        return
    await process_jobs(settings, queue, 3)
    assert (await running)["completed"] == 3


async def test_a_trigger_logs_progress_though_no_job_ends(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.JOB_REPORTS_PROGRESS_SECONDS, 0.05)
    queue = await provisioned(settings, queue_of(name))
    trigger = await completion_trigger(connection, queue, 2)
    lines = logged(monkeypatch, trigger)

    async def fired() -> dict[str, Any]:
        event = await anext(trigger.run())
        payload: dict[str, Any] = event.payload
        return payload

    running = asyncio.create_task(fired())
    await eventually(lambda: len(lines) > 1)
    await process_jobs(settings, queue, 1)
    await eventually(lambda: [line for line in lines if "1 completed" in line and "1 to go" in line])
    await process_jobs(settings, queue, 1)
    assert json.loads(json.dumps(await running))["status"] == "ended"
    count = len(lines)
    await asyncio.sleep(0.2)
    assert len(lines) == count
