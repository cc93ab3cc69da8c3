"""Retries and clears of publishing tasks, in a real Airflow."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from airflow_steps import log_text, provisioned, succeeded, wait_for, wait_for_states
from dags.retried_publishing import queue

from airflow_provider_jetstream.jetstream import connect
from testbed.dead_letters import stream_messages
from testbed.face import stream_info
from testbed.queues import pull_jobs, store_completion

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.airflow import Airflow

RUN = "retried"


def clear(airflow: Airflow, dag_id: str) -> None:
    # The run ends a moment after its task: a task that is cleared in between belongs to a failed run and never starts.
    airflow.wait_for_run(dag_id, RUN)
    body = {"dag_run_id": RUN, "task_ids": [dag_id], "dry_run": False, "only_failed": False, "reset_dag_runs": True}
    airflow.api("POST", f"dags/{dag_id}/clearTaskInstances", body)


async def test_a_retry_whose_source_has_another_order_stores_each_job_once(
    airflow: Airflow, settings: ConnectionSettings
) -> None:
    permuted = await provisioned(settings, queue("permuted"))
    airflow.wait_for_dags("permuted")
    airflow.trigger("permuted", run_id=RUN)
    await asyncio.to_thread(succeeded, airflow, "permuted", RUN)
    assert "the source of the jobs failed" in log_text(airflow, "permuted", RUN, "permuted")
    async with connect(settings) as connection:
        bodies = [message.data.decode() for message in await stream_messages(connection, permuted.name)]
    assert sorted(bodies) == [f"job-{number}" for number in range(6)]
    result = airflow.xcom("permuted", RUN, "permuted")
    assert (result["published"], result["duplicates"]) == (6, 3)


async def test_a_clear_beside_running_jobs_publishes_none_of_them_again(
    airflow: Airflow, settings: ConnectionSettings
) -> None:
    siblings = await provisioned(settings, queue("siblings"))
    airflow.wait_for_dags("siblings")
    airflow.trigger("siblings", run_id=RUN)
    async with connect(settings) as connection:

        async def last_sequence() -> int:
            return int((await stream_info(connection, siblings.name))["state"]["last_seq"])

        dies, runs = await pull_jobs(connection, siblings, 2, consumer="worker", within=120)
        await asyncio.to_thread(wait_for_states, airflow, "siblings", RUN, {"siblings": "deferred"})
        await dies.term()
        await asyncio.to_thread(wait_for_states, airflow, "siblings", RUN, {"siblings": "failed"})
        await asyncio.to_thread(clear, airflow, "siblings")
        await asyncio.to_thread(wait_for_tries, airflow, 2)
        assert await last_sequence() == 2
        await store_completion(connection, siblings, runs.metadata.sequence.stream)
        await runs.ack_sync()
        # All of them have ended, so that the next clear publishes anew.
        await asyncio.to_thread(clear, airflow, "siblings")
        again = await pull_jobs(connection, siblings, 2, consumer="worker", within=120)
        assert sorted(message.data for message in again) == [b"dies", b"runs"]
        for message in again:
            await store_completion(connection, siblings, message.metadata.sequence.stream)
            await message.ack_sync()
    await asyncio.to_thread(succeeded, airflow, "siblings", RUN)


def wait_for_tries(airflow: Airflow, number: int) -> None:
    """Wait until a try of the task has failed."""

    def has_failed() -> bool:
        (task,) = airflow.task_instances("siblings", RUN)
        return bool(task["try_number"] == number and task["state"] == "failed")

    wait_for(has_failed, f"try {number} to fail")
