"""Waiting occupies no worker slot, and jobs that end while no triggerer runs aren't missed."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from airflow_steps import process_jobs, provisioned, succeeded, wait_for, wait_for_states
from dags.waiting import queue

from airflow_provider_jetstream.dev.airflow_home import database_path
from testbed.face import stream_info

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow_steps import Secrets

    from airflow_provider_jetstream.jetstream import Connection, ConnectionSettings
    from testbed.airflow import Airflow

QUEUE = queue("survives")


@pytest.fixture
def triggerer_afterwards(airflow: Airflow) -> Iterator[None]:
    """Leave a running triggerer to the other tests."""
    yield
    if "triggerer" not in airflow.pids():
        airflow.start_triggerer()


def stored_triggers(airflow: Airflow) -> list[str]:
    with closing(sqlite3.connect(f"file:{database_path(airflow.home)}?mode=ro", uri=True)) as database:
        rows = database.execute("SELECT kwargs FROM trigger WHERE classpath LIKE '%JobCompletionTrigger'")
        return [kwargs for (kwargs,) in rows if '"survives"' in kwargs]


async def test_jobs_that_end_while_no_triggerer_runs_are_not_missed(
    airflow: Airflow,
    settings: ConnectionSettings,
    connection: Connection,
    secrets: Secrets,
    triggerer_afterwards: None,
) -> None:
    await provisioned(settings, QUEUE)
    airflow.wait_for_dags("survives")
    run_id = airflow.trigger("survives")
    wait_for_states(airflow, "survives", run_id, {"survives": "deferred"})
    # No worker of the queue runs, and none of Airflow's own slots is occupied.
    assert (await stream_info(connection, "survives"))["state"]["messages"] == 10
    assert airflow.api("GET", "pools/default_pool")["occupied_slots"] == 0

    # The waiting task is a small row of plain JSON that any triggerer can read.
    (kwargs,) = wait_for(lambda: stored_triggers(airflow), "a stored trigger")
    assert '"survives_events"' in json.dumps(json.loads(kwargs))
    assert len(kwargs) < 2048
    assert not any(secret in kwargs for secret in secrets.all())

    airflow.kill_triggerer()
    assert len(await process_jobs(settings, QUEUE, 6)) == 6
    wait_for_states(airflow, "survives", run_id, {"survives": "deferred"})
    airflow.start_triggerer()
    assert len(await process_jobs(settings, QUEUE, 4)) == 4
    succeeded(airflow, "survives", run_id)
    (task,) = airflow.task_instances("survives", run_id)
    assert task["try_number"] == 1
    result = airflow.xcom("survives", run_id, "survives")
    assert (result["published"], result["completed"], result["dead"]) == (10, 10, 0)
    assert result["completed_sequences"] == result["sequences"]
