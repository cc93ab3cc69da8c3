"""Tasks whose jobs are cancelled, scheduled, or divided into partitions."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from airflow_steps import log_text, provisioned, task_states, wait_for_states
from dags.cancelled import DIVIDED, queue

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream import connect
from airflow_provider_jetstream.jetstream.contract import JOB_ID
from testbed.face import find_cancellation
from testbed.queues import eventually, pull_jobs, running_mover, store_completion, stored_count, stored_nanoseconds

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.airflow import Airflow

RUN = "cancelling"
WAITING = ("cancelled_deferred", "cancelled_blocking", "cancelled_allowed")


async def _process(settings: ConnectionSettings, name: str) -> None:
    """Process the jobs of a queue as a worker that obeys cancellations."""
    async with connect(settings) as connection:
        for message in await pull_jobs(connection, queue(name), 2, within=120):
            metadata = message.metadata
            job_id = (message.headers or {})[JOB_ID]
            cancellation = await find_cancellation(connection, queue(name), job_id, metadata.timestamp)
            end: dict[str, Any] = {"stored_nanoseconds": stored_nanoseconds(message)}
            if cancellation:
                end |= {"type": "io.airflow.jetstream.v1.cancelled", "why": cancellation.why, "by": cancellation.by}
            await store_completion(connection, queue(name), metadata.sequence.stream, **end)
            await message.ack_sync()


async def _all_stored(settings: ConnectionSettings, name: str) -> bool:
    async with connect(settings) as connection:
        return await stored_count(connection, name) == 2


@pytest.fixture(scope="module", autouse=True)
def runs(airflow: Airflow, settings: ConnectionSettings) -> None:
    """Start all runs at once, since each spends its time waiting."""
    airflow.wait_for_dags("cancelled", "divided")
    for declared in (*map(queue, WAITING), DIVIDED):
        asyncio.run(provisioned(settings, declared))
    for dag in ("cancelled", "divided"):
        airflow.trigger(dag, run_id=RUN)


@pytest.mark.usefixtures("own_connections")
@pytest.mark.parametrize("task_id", WAITING)
async def test_a_task_whose_job_was_cancelled_fails_without_a_retry_unless_max_cancelled_allows_it(
    airflow: Airflow, settings: ConnectionSettings, task_id: str
) -> None:
    await eventually(lambda: _all_stored(settings, task_id), within=120)
    report = await JetStreamHook().acancel(queue(task_id), f"{task_id}-1", "wrong price", "ann")
    assert (report.cancellation.job_id, report.schedules) == (f"{task_id}-1", 0)
    await _process(settings, task_id)
    if task_id == "cancelled_allowed":
        await asyncio.to_thread(wait_for_states, airflow, "cancelled", RUN, {task_id: "success"})
        result = airflow.xcom("cancelled", RUN, task_id)
        assert (result["completed"], result["cancelled"]) == (1, 1)
        assert result["cancelled_reasons"] == {"2": "ann: wrong price"}
        return
    await asyncio.to_thread(wait_for_states, airflow, "cancelled", RUN, {task_id: "failed"})
    log = log_text(airflow, "cancelled", RUN, task_id)
    assert "AirflowFailException: JS134 expected at most 0 cancelled jobs, found 1: job " in log
    assert (
        "(sequence 2): ann: wrong price; allow them with max_cancelled, or publish again the jobs that are still wanted"
        in log
    )


async def test_jobs_are_scheduled_and_published_into_their_partition(
    airflow: Airflow, settings: ConnectionSettings
) -> None:
    expected = {"later": "success", "later_and_wait": "failed"}
    await asyncio.to_thread(wait_for_states, airflow, "divided", RUN, expected)
    result = airflow.xcom("divided", RUN, "later")
    assert (result["published"], result["scheduled"], result["sequences"]) == (3, 2, [[1, 1]])
    log = log_text(airflow, "divided", RUN, "later_and_wait")
    assert "JS120 job 0 is scheduled, and the server gives it a sequence only when it is due" in log
    async with connect(settings) as connection, running_mover(connection, DIVIDED):
        # The partition of "email" among four.
        messages = await pull_jobs(connection, DIVIDED, 2, consumer="worker-3", within=120)
    assert [message.data for message in messages] == [b"now", b"later"]
    assert task_states(airflow, "cancelled", RUN).keys() == set(WAITING)
