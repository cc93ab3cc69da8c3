"""min_completed, the results of jobs, and a later try that only resumes waiting."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from airflow_steps import log_text, provisioned, succeeded, wait_for_states
from dags.interrupted_waits import queue

from airflow_provider_jetstream.jetstream import connect
from testbed.queues import pull_jobs, store_completion, wait_for_entries

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.airflow import Airflow
    from testbed.face import NatsPyConnection

RUN = "enough"
WAITING = ("any_of_three", "two_of_four", "three_of_three", "with_results")


@pytest.fixture(scope="module", autouse=True)
def runs(airflow: Airflow, settings: ConnectionSettings) -> None:
    """Start all runs at once, since each spends its time waiting."""
    airflow.wait_for_dags("enough", "again")
    for name in (*WAITING, "again"):
        asyncio.run(provisioned(settings, queue(name)))
    for dag_id in ("enough", "again"):
        airflow.trigger(dag_id, run_id=RUN)
    wait_for_states(airflow, "enough", RUN, dict.fromkeys(WAITING, "deferred"))
    asyncio.run(end_jobs(settings))


async def end_jobs(settings: ConnectionSettings) -> None:
    async with connect(settings) as connection:
        await complete(connection, "any_of_three", 1)
        await complete(connection, "two_of_four", 2)
        for message in await pull_jobs(connection, queue("three_of_three"), 1):
            await message.nak()
        await wait_for_entries(connection, queue("three_of_three"), 1)
        await complete(connection, "with_results", 3)


async def complete(connection: NatsPyConnection, name: str, count: int) -> None:
    """Complete jobs as a worker in any language does."""
    for message in await pull_jobs(connection, queue(name), count):
        sequence = message.metadata.sequence.stream
        job_id = (message.headers or {})["Job-Id"]
        await store_completion(connection, queue(name), sequence, job_id=job_id, result={"rows": sequence * 10})
        await message.ack_sync()


@pytest.mark.parametrize(("task_id", "count", "completed"), [("any_of_three", 3, 1), ("two_of_four", 4, 2)])
def test_the_task_succeeds_once_enough_jobs_completed(
    airflow: Airflow, task_id: str, count: int, completed: int
) -> None:
    wait_for_states(airflow, "enough", RUN, {task_id: "success"})
    result = airflow.xcom("enough", RUN, task_id)
    assert (result["published"], result["completed"], result["awaited"]) == (count, completed, count - completed)
    assert result["results"] == {f"{task_id}-{number}": {"rows": number * 10 + 10} for number in range(completed)}


def test_the_task_fails_once_too_few_jobs_can_complete(airflow: Airflow) -> None:
    wait_for_states(airflow, "enough", RUN, {"three_of_three": "failed"})
    assert (
        "expected at least 3 jobs to complete, found 0; 1 became dead letters, 0 were cancelled, 0 are unaccounted"
        " for: fix the cause, then redrive"
    ) in log_text(airflow, "enough", RUN, "three_of_three")


def test_the_results_of_handlers_are_part_of_the_tasks_result(airflow: Airflow) -> None:
    wait_for_states(airflow, "enough", RUN, {"with_results": "success"})
    result = airflow.xcom("enough", RUN, "with_results")
    assert result["results"] == {f"with_results-{number}": {"rows": number * 10 + 10} for number in range(3)}
    assert (result["completed"], result["results_left_out"]) == (3, 0)


async def test_a_try_after_one_that_timed_out_publishes_nothing(airflow: Airflow, settings: ConnectionSettings) -> None:
    await asyncio.to_thread(wait_for_states, airflow, "again", RUN, {"again": "up_for_retry"}, 60)
    assert "3 of again that did not (sequences 1-3)" in log_text(airflow, "again", RUN, "again")
    async with connect(settings) as connection:
        await complete(connection, "again", 3)
        await asyncio.to_thread(succeeded, airflow, "again", RUN)
        info = await connection.api("STREAM.INFO.again")
    assert info["state"]["last_seq"] == 3
    result = airflow.xcom("again", RUN, "again")
    assert (result["published"], result["duplicates"], result["completed"]) == (3, 3, 3)
    (task,) = airflow.task_instances("again", RUN)
    assert task["try_number"] > 1
