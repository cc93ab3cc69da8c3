"""Waits of runs that Airflow makes for several dates: catch-up, one date after the other, and backfills."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import pytest
from airflow_steps import log_text, provisioned, wait_for
from dags.dated_runs import DATES, queue

from airflow_provider_jetstream.jetstream import connect
from testbed.airflow_client import AirflowApiError
from testbed.face import stream_info
from testbed.queues import pull_jobs, store_completion

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.airflow import Airflow
    from testbed.face import NatsPyConnection


@pytest.fixture(scope="module", autouse=True)
def runs(airflow: Airflow, settings: ConnectionSettings) -> None:
    """Provision the queues, and let Airflow make the runs of the past dates."""
    for name in ("caught_up", "filled"):
        asyncio.run(provisioned(settings, queue(name)))
    airflow.wait_for_dags("caught_up", "filled")


def run_ids(airflow: Airflow, dag_id: str) -> dict[str, str]:
    """Return the runs of a DAG by their dates."""
    return {str(run["logical_date"])[:10]: str(run["dag_run_id"]) for run in airflow.runs(dag_id)}


def wait_for_task(airflow: Airflow, dag_id: str, date: str, state: str, try_number: int = 1) -> None:
    """Wait until the one task of a date's run has a state in its n-th try."""
    seen: dict[str, Any] = {}

    def is_so() -> bool:
        for run_date, run_id in run_ids(airflow, dag_id).items():
            for task in airflow.task_instances(dag_id, run_id):
                seen[run_date] = (task["state"], task["try_number"])
        return bool(seen.get(date) == (state, try_number))

    try:
        wait_for(is_so, f"{date} to be {state} in try {try_number}", timeout=300)
    except AssertionError as error:
        raise AssertionError(f"{error}; found {seen}") from None


def start_backfill(airflow: Airflow, body: dict[str, Any]) -> None:
    """Start a backfill, once the scheduler has seen the end of the one before."""

    def is_started() -> bool:
        try:
            airflow.api("POST", "backfills", body)
        except AirflowApiError as error:
            if error.status != HTTPStatus.CONFLICT:
                raise
            return False
        return True

    wait_for(is_started, "the start of a backfill")


async def complete(connection: NatsPyConnection, name: str, count: int) -> list[str]:
    """Process so many jobs as a worker does, and return their bodies."""
    jobs = await pull_jobs(connection, queue(name), count, consumer="worker", within=300)
    for job in jobs:
        await store_completion(connection, queue(name), job.metadata.sequence.stream)
        await job.ack_sync()
    return sorted(job.data.decode() for job in jobs)


async def last_sequence(connection: NatsPyConnection, name: str) -> int:
    """Return how many jobs a queue has ever stored."""
    return int((await stream_info(connection, name))["state"]["last_seq"])


async def test_catching_up_waits_for_one_date_after_the_other_and_goes_on_once_a_failed_one_is_cleared(
    airflow: Airflow, settings: ConnectionSettings
) -> None:
    first, second, third = DATES
    async with connect(settings) as connection:
        await asyncio.to_thread(wait_for_task, airflow, "caught_up", first, "deferred")
        assert await last_sequence(connection, "caught_up") == 1
        assert await complete(connection, "caught_up", 1) == [first]
        await asyncio.to_thread(wait_for_task, airflow, "caught_up", first, "success")
        (dies,) = await pull_jobs(connection, queue("caught_up"), 1, consumer="worker", within=300)
        assert dies.data.decode() == second
        await asyncio.to_thread(wait_for_task, airflow, "caught_up", second, "deferred")
        await dies.term()
        # The jobs of a date that is dead are nothing that another try could end otherwise.
        await asyncio.to_thread(wait_for_task, airflow, "caught_up", second, "failed")
        ids = await asyncio.to_thread(run_ids, airflow, "caught_up")
        assert "JS131 expected at most 0 dead letters, found 1" in log_text(
            airflow, "caught_up", ids[second], "caught_up"
        )
        await asyncio.to_thread(airflow.wait_for_run, "caught_up", ids[second])
        assert await last_sequence(connection, "caught_up") == 2
        body = {"dag_run_id": ids[second], "dry_run": False, "only_failed": True, "reset_dag_runs": True}
        await asyncio.to_thread(airflow.api, "POST", "dags/caught_up/clearTaskInstances", body)
        assert await complete(connection, "caught_up", 1) == [second]
        await asyncio.to_thread(wait_for_task, airflow, "caught_up", second, "success", 2)
        assert await complete(connection, "caught_up", 1) == [third]
        await asyncio.to_thread(wait_for_task, airflow, "caught_up", third, "success")
        assert await last_sequence(connection, "caught_up") == 4
    results = [airflow.xcom("caught_up", ids[date], "caught_up") for date in DATES]
    assert [result["sequences"] for result in results] == [[[1, 1]], [[3, 3]], [[4, 4]]]


async def test_a_backfill_publishes_for_each_date_and_another_one_publishes_anew(
    airflow: Airflow, settings: ConnectionSettings
) -> None:
    body = {
        "dag_id": "filled",
        "from_date": f"{DATES[0]}T00:00:00Z",
        "to_date": f"{DATES[-1]}T00:00:00Z",
        "max_active_runs": len(DATES),
    }
    async with connect(settings) as connection:
        for number, behavior in enumerate(("none", "completed"), 1):
            await asyncio.to_thread(start_backfill, airflow, body | {"reprocess_behavior": behavior})
            for date in DATES:
                await asyncio.to_thread(wait_for_task, airflow, "filled", date, "deferred", number)
            assert await last_sequence(connection, "filled") == number * len(DATES)
            assert await complete(connection, "filled", len(DATES)) == list(DATES)
            for date, run_id in run_ids(airflow, "filled").items():
                await asyncio.to_thread(wait_for_task, airflow, "filled", date, "success", number)
                await asyncio.to_thread(airflow.wait_for_run, "filled", run_id)
                result = airflow.xcom("filled", run_id, "filled")
                assert (result["published"], result["duplicates"], result["completed"]) == (1, 0, 1)
