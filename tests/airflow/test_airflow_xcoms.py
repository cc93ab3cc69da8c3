"""Objects of the package pass XComs; a queue's file is found by DAGs that others make; a redrive's end, told alike."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from airflow_steps import process_jobs, succeeded
from dags.passed import DYING, QUEUE

from airflow_provider_jetstream.jetstream import WorkQueue, connect, list_redrives
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from testbed.face import stream_info
from testbed.queues import eventually

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import Connection, ConnectionSettings
    from testbed.airflow import Airflow

RUN = "passed.1"
DAGS = ("passed", "made_of_every_kind", "died_again")


@pytest.fixture(scope="module", autouse=True)
def runs(airflow: Airflow) -> None:
    """Start all runs at once."""
    airflow.wait_for_dags(*DAGS)
    for dag in DAGS:
        airflow.trigger(dag, run_id=RUN)


async def _has_stored(connection: Connection, queue: str, count: int) -> bool:
    try:
        return bool((await stream_info(connection, queue))["state"]["last_seq"] >= count)
    except NotFoundError:
        return False


async def _work(
    settings: ConnectionSettings, queue: dict[str, Any], count: int, *, last: int, fail: bool = False
) -> None:
    """Do so many jobs once the last of them is stored."""
    async with connect(settings) as connection:
        await eventually(lambda: _has_stored(connection, queue["name"], last), within=240)
    await process_jobs(settings, WorkQueue(**queue), count, fail=fail)


async def test_jobs_queues_and_reports_pass_from_task_to_task(airflow: Airflow, settings: ConnectionSettings) -> None:
    await _work(settings, QUEUE, 4, last=4)
    await asyncio.to_thread(succeeded, airflow, "passed", RUN)
    assert airflow.xcom("passed", RUN, "publish")["published"] == 2
    assert airflow.xcom("passed", RUN, "wait")["completed"] == 2


async def test_tasks_of_dags_that_a_factory_makes_find_the_file_beside_their_dags(airflow: Airflow) -> None:
    await asyncio.to_thread(succeeded, airflow, "made_of_every_kind", RUN)
    for task in ("plain", "templated", "group.grouped"):
        assert airflow.xcom("made_of_every_kind", RUN, task)["stream"] == "made"


async def test_xcom_audit_and_page_tell_the_same_of_a_redrive(airflow: Airflow, settings: ConnectionSettings) -> None:
    for last in (1, 2):
        await _work(settings, DYING, 1, last=last, fail=True)
    await asyncio.to_thread(succeeded, airflow, "died_again", RUN)
    result = airflow.xcom("died_again", RUN, "redrive")
    outcomes = {"completed": 0, "died_again": 1, "still_running": 0, "unknown": 0}
    assert (result["state"], result["outcomes"], result["dead"]) == ("finished", outcomes, 1)
    async with connect(settings) as connection:
        (redrive,) = await list_redrives(connection, WorkQueue(**DYING))
    assert (redrive.state, redrive.outcomes.model_dump(), redrive.id) == ("finished", outcomes, result["redrive"])
    path = f"/jetstream/api/queues/nats_default/passed_dying/redrives/{redrive.id}"
    page = airflow.request("GET", path).json()
    assert (page["state"], page["outcomes"], page["failures"]) == ("finished", outcomes, {})
