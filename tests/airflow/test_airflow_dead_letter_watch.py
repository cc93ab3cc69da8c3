"""The DAG ``dead_letter_watch``: invoices that died start its run, which brings them back, once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from airflow_steps import ROOT, process_jobs, provisioned, succeeded, wait_for

from airflow_provider_jetstream.jetstream import WorkQueue
from testbed.queues import until_stored

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.airflow import Airflow
    from testbed.face import NatsPyConnection

DAG_ID = "dead_letter_watch"
QUEUE = ROOT / "example_dags" / "queues" / "invoices.yaml"


def asset_events(airflow: Airflow, dag_id: str, task_id: str | None = None) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = airflow.api("GET", "assets/events?limit=100&order_by=timestamp")["asset_events"]
    return [event for event in events if (event["source_dag_id"], event["source_task_id"]) == (dag_id, task_id)]


async def test_a_death_starts_the_run_that_brings_the_jobs_back(
    airflow: Airflow, settings: ConnectionSettings, connection: NatsPyConnection
) -> None:
    queue = await provisioned(settings, WorkQueue.load(QUEUE))
    airflow.wait_for_dags(DAG_ID, "invoices")
    # Airflow starts a watcher when it parses the file of a DAG that isn't paused any more.
    airflow.reparse(DAG_ID)
    run_id = airflow.trigger("invoices")
    await asyncio.to_thread(succeeded, airflow, "invoices", run_id)
    # The event of the publishing task says what it published.
    (event,) = asset_events(airflow, "invoices", "publish")
    assert event["extra"] == {
        "run_id": run_id,
        "published": 3,
        "duplicates": 0,
        "scheduled": 0,
        "sequences": [[1, 3]],
    }
    await process_jobs(settings, queue, 6, fail=True)
    (run,) = await asyncio.to_thread(wait_for, lambda: airflow.runs(DAG_ID), "a run that the letters start")
    assert run["run_type"] == "asset_triggered"
    await asyncio.to_thread(succeeded, airflow, DAG_ID, run["dag_run_id"])
    working = asyncio.create_task(process_jobs(settings, queue, 3))
    assert len(await working) == 3
    await until_stored(connection, queue.name, 0)
    events = [event for each in airflow.runs(DAG_ID) for event in airflow.xcom(DAG_ID, each["dag_run_id"], "causes")]
    assert [event["queue"] for event in events] == ["invoices"] * len(events)
    # Each letter was reported once, however many events that took.
    assert sum(event["arrived"] for event in events) <= 3
    redriven = [
        event["extra"]["redriven"] for event in asset_events(airflow, DAG_ID, "redrive") if "redriven" in event["extra"]
    ]
    assert sum(redriven) == 3
    airflow.api("PATCH", f"dags/{DAG_ID}", {"is_paused": True})
