"""A thousand deferred tasks in a real triggerer that is killed -9: all of them end right after its return."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from airflow_steps import wait_for
from dags.thousand_tasks import CROWD, NO_SLOTS
from trigger_steps import store_triggers

from airflow_provider_jetstream.jetstream.client.stream_api import consumer_names
from testbed.airflow_settings import database_path
from testbed.queues import make_queue
from testbed.waiters import store_completions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from testbed.airflow import Airflow

RUN = "crowd"
PATIENCE = 240.0
EARLY = 300


def states(airflow: Airflow) -> Counter[str]:
    """Count the tasks by state, in the database: the API gives a hundred at a time."""
    with closing(sqlite3.connect(f"file:{database_path(airflow.home)}?mode=ro", uri=True)) as database:
        return Counter(
            dict(database.execute("SELECT state, count(*) FROM task_instance WHERE dag_id = 'crowd' GROUP BY state"))
        )


def events(airflow: Airflow) -> list[str]:
    """Give what each task will go on with."""
    with closing(sqlite3.connect(f"file:{database_path(airflow.home)}?mode=ro", uri=True)) as database:
        found = database.execute("SELECT next_kwargs FROM task_instance WHERE dag_id = 'crowd' ORDER BY map_index")
        return [kwargs for (kwargs,) in found]


def triggers_running(airflow: Airflow) -> int:
    """Count the triggers that have begun: each has a log of its own."""
    return sum(1 for _ in (airflow.home / "logs" / "dag_id=crowd").rglob("*.trigger.*.log"))


@pytest.fixture
def run(airflow: Airflow) -> Iterator[str]:
    """A run whose tasks all wait for a slot that nobody frees; away afterwards, and a triggerer up."""
    airflow.api("POST", "pools", {"name": NO_SLOTS, "slots": 0})
    airflow.wait_for_dags("crowd")
    airflow.trigger("crowd", run_id=RUN)
    wait_for(lambda: states(airflow) == {"scheduled": CROWD}, f"{CROWD} tasks", PATIENCE)
    yield RUN
    airflow.api("PATCH", f"dags/crowd/dagRuns/{RUN}", {"state": "failed"})
    airflow.api("DELETE", f"dags/crowd/dagRuns/{RUN}")
    if "triggerer" not in airflow.pids():
        airflow.start_triggerer()


async def test_all_end_after_their_triggerer_was_killed_while_they_waited(
    airflow: Airflow, connection: Connection, name: str, run: str, tmp_path: Path
) -> None:
    queue = await make_queue(connection, name)
    stored = tmp_path / "triggers.jsonl"
    shared, *jobs = await store_triggers(connection, queue, stored, CROWD)
    script = Path(__file__).with_name("defer_tasks.py")
    command = [sys.executable, script, "crowd", run, stored]
    await asyncio.to_thread(subprocess.run, command, env=airflow.env, cwd=airflow.home, check=True)
    assert states(airflow) == {"deferred": CROWD}

    await asyncio.to_thread(wait_for, lambda: triggers_running(airflow) >= CROWD, "all triggers to run", PATIENCE)
    assert len(await consumer_names(connection, f"{queue.name}-events")) == 1
    airflow.kill_triggerer()
    await store_completions(connection, queue, [shared, *jobs[:EARLY]])
    assert states(airflow) == {"deferred": CROWD}
    began = time.monotonic()
    await asyncio.to_thread(airflow.start_triggerer)
    await asyncio.to_thread(
        wait_for, lambda: states(airflow)["scheduled"] >= EARLY, f"{EARLY} tasks to go on", PATIENCE
    )
    await store_completions(connection, queue, jobs[EARLY:])
    await asyncio.to_thread(wait_for, lambda: states(airflow) == {"scheduled": CROWD}, "all to go on", PATIENCE)
    print(f"all {CROWD} tasks go on {time.monotonic() - began:.0f} s after the triggerer was started again")
    for number, event in enumerate(events(airflow)):
        assert '"ended"' in event, event
        assert f'"job": {jobs[number]}' in event
