"""A person ends a waiting task: with cancel_on_kill its jobs are cancelled, unless the task is only cleared."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from airflow_steps import log_text, provisioned, task_states, wait_for, wait_for_states
from dags.interrupted_waits import ENDED, queue

from airflow_provider_jetstream.jetstream import connect
from airflow_provider_jetstream.jetstream.contract import cancellation_filter
from airflow_provider_jetstream.worker import Delivery, Worker
from testbed.dead_letters import stream_messages
from testbed.queues import eventually, running_worker, stored_count, until_stored

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.airflow import Airflow

RUN = "ended"


@pytest.fixture(scope="module", autouse=True)
def run(airflow: Airflow, settings: ConnectionSettings) -> None:
    """Start all tasks at once, and let each wait for its jobs."""
    airflow.wait_for_dags("ended")
    for task_id in ENDED:
        asyncio.run(provisioned(settings, queue(task_id)))
    airflow.trigger("ended", run_id=RUN)
    waiting = {task_id: "deferred" if "deferred" in task_id else "running" for task_id in ENDED}
    wait_for_states(airflow, "ended", RUN, waiting)
    # Airflow calls no on_kill for a task that is ended before its trigger has started.
    for task_id in ("marked_deferred", "cleared_deferred"):
        wait_for(lambda name=task_id: "starting" in log_text(airflow, "ended", RUN, name), "a trigger")  # type: ignore[misc]
    for task_id in ENDED:
        asyncio.run(process_one(settings, task_id))


async def process_one(settings: ConnectionSettings, task_id: str) -> None:
    """Process the first job, once all are stored."""
    async with connect(settings) as connection:
        await until_stored(connection, task_id, 3, within=120)
    processed = await process_remaining(settings, task_id, at_most=1)
    assert processed == [f"{task_id}-0"]


async def process_remaining(settings: ConnectionSettings, task_id: str, at_most: int = 3) -> list[str | None]:
    """Run a worker until the queue is empty or it has processed so many jobs; return their ids."""
    processed: list[str | None] = []

    async def handle(job: Delivery) -> None:
        processed.append(job.id)
        if len(processed) == at_most:
            worker.stop()

    worker = Worker(queue(task_id), "worker", handle, settings)
    async with connect(settings) as connection, running_worker(worker) as working:

        async def is_over() -> bool:
            return working.done() or not await stored_count(connection, task_id)

        await eventually(is_over, within=120)
    return processed


async def cancellation_count(settings: ConnectionSettings, task_id: str) -> int:
    """Count the stored cancellations."""
    async with connect(settings) as connection:
        return len(await stream_messages(connection, f"{task_id}_events", cancellation_filter(task_id)))


def set_state(airflow: Airflow, task_id: str, state: str) -> None:
    airflow.api("PATCH", f"dags/ended/dagRuns/{RUN}/taskInstances/{task_id}", {"new_state": state})


def clear(airflow: Airflow, task_id: str) -> None:
    body = {"dag_run_id": RUN, "task_ids": [task_id], "dry_run": False, "only_failed": False}
    airflow.api("POST", "dags/ended/clearTaskInstances", body)


@pytest.mark.parametrize("task_id", ["marked_deferred", "marked_blocking"])
async def test_marking_a_task_as_failed_cancels_its_jobs(
    airflow: Airflow, settings: ConnectionSettings, task_id: str
) -> None:
    await asyncio.to_thread(set_state, airflow, task_id, "failed")

    async def unfinished_are_cancelled() -> bool:
        return await cancellation_count(settings, task_id) == 2

    await eventually(unfinished_are_cancelled, within=120)
    assert await process_remaining(settings, task_id) == []
    assert task_states(airflow, "ended", RUN)[task_id] == "failed"
    assert await cancellation_count(settings, task_id) == 2


@pytest.mark.parametrize("task_id", ["cleared_deferred", "cleared_blocking"])
async def test_clearing_a_task_cancels_nothing_and_it_resumes_waiting(
    airflow: Airflow, settings: ConnectionSettings, task_id: str
) -> None:
    await asyncio.to_thread(clear, airflow, task_id)

    def waits_again() -> bool:
        tasks = {task["task_id"]: task for task in airflow.task_instances("ended", RUN)}
        return tasks[task_id]["try_number"] == 2 and tasks[task_id]["state"] in ("deferred", "running")

    await asyncio.to_thread(wait_for, waits_again, "a second try")
    line = "The task goes on, so its jobs do too"
    await asyncio.to_thread(wait_for, lambda: line in log_text(airflow, "ended", RUN, task_id), line)
    assert await cancellation_count(settings, task_id) == 0
    processed = await process_remaining(settings, task_id)
    assert sorted(map(str, processed)) == [f"{task_id}-{number}" for number in (1, 2)]
    await asyncio.to_thread(wait_for_states, airflow, "ended", RUN, {task_id: "success"})
    result = airflow.xcom("ended", RUN, task_id)
    assert (result["published"], result["duplicates"], result["completed"]) == (3, 3, 3)
    async with connect(settings) as connection:
        info = await connection.api(f"STREAM.INFO.{task_id}")
    assert info["state"]["last_seq"] == 3
