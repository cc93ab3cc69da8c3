"""A thousand deferred tasks in a real triggerer that is killed: all resume soon after it is started again."""

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
from dags.thousand_tasks import COUNT, NO_SLOTS
from trigger_steps import store_triggers

from airflow_provider_jetstream.dev.airflow_home import database_path
from testbed.queues import make_queue
from testbed.waiters import store_completions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.airflow import Airflow
    from testbed.face import NatsPyConnection

DAG_ID = "thousand_tasks"
RUN = "run"
TIMEOUT = 240.0
EARLY = 300


def states(airflow: Airflow) -> Counter[str]:
    """Count the tasks by state, in the database: the API returns a hundred at a time."""
    with closing(sqlite3.connect(f"file:{database_path(airflow.home)}?mode=ro", uri=True)) as database:
        return Counter(
            dict(
                database.execute("SELECT state, count(*) FROM task_instance WHERE dag_id = ? GROUP BY state", [DAG_ID])
            )
        )


def events(airflow: Airflow) -> list[str]:
    """Return the arguments with which each task will resume."""
    with closing(sqlite3.connect(f"file:{database_path(airflow.home)}?mode=ro", uri=True)) as database:
        rows = database.execute("SELECT next_kwargs FROM task_instance WHERE dag_id = ? ORDER BY map_index", [DAG_ID])
        return [kwargs for (kwargs,) in rows]


def triggers_running(airflow: Airflow) -> int:
    """Count the started triggers: each has a log of its own."""
    return sum(1 for _ in (airflow.home / "logs" / f"dag_id={DAG_ID}").rglob("*.trigger.*.log"))


@pytest.fixture
def run(airflow: Airflow) -> Iterator[str]:
    """A run whose tasks never get a slot; afterwards it has failed and a triggerer runs."""
    airflow.api("POST", "pools", {"name": NO_SLOTS, "slots": 0})
    airflow.wait_for_dags(DAG_ID)
    airflow.trigger(DAG_ID, run_id=RUN)
    wait_for(lambda: states(airflow) == {"scheduled": COUNT}, f"{COUNT} tasks", TIMEOUT)
    yield RUN
    # Not deleted: a scheduler that is about to schedule a deleted run ends with an ObjectDeletedError.
    airflow.api("PATCH", f"dags/{DAG_ID}/dagRuns/{RUN}", {"state": "failed"})
    if "triggerer" not in airflow.pids():
        airflow.start_triggerer()


async def test_all_resume_after_their_triggerer_was_killed(
    airflow: Airflow, connection: NatsPyConnection, name: str, run: str, tmp_path: Path
) -> None:
    queue = await make_queue(connection, name)
    stored = tmp_path / "triggers.jsonl"
    shared, *jobs = await store_triggers(connection, queue, stored, COUNT)
    script = Path(__file__).with_name("defer_tasks.py")
    command = [sys.executable, str(script), DAG_ID, run, str(stored)]
    await asyncio.to_thread(subprocess.run, command, env=airflow.env, cwd=airflow.home, check=True)
    assert states(airflow) == {"deferred": COUNT}

    await asyncio.to_thread(wait_for, lambda: triggers_running(airflow) >= COUNT, "all triggers to run", TIMEOUT)
    assert len((await connection.api(f"CONSUMER.NAMES.{queue.name}-events"))["consumers"]) == 1
    airflow.kill_triggerer()
    await store_completions(connection, queue, [shared, *jobs[:EARLY]])
    assert states(airflow) == {"deferred": COUNT}
    started = time.monotonic()
    await asyncio.to_thread(airflow.start_triggerer)
    await asyncio.to_thread(
        wait_for, lambda: states(airflow)["scheduled"] >= EARLY, f"{EARLY} tasks to resume", TIMEOUT
    )
    await store_completions(connection, queue, jobs[EARLY:])
    await asyncio.to_thread(wait_for, lambda: states(airflow) == {"scheduled": COUNT}, "all tasks to resume", TIMEOUT)
    print(f"all {COUNT} tasks resume {time.monotonic() - started:.0f} s after the triggerer was started again")
    for number, event in enumerate(events(airflow)):
        assert '"ended"' in event, event
        assert f'"job": {jobs[number]}' in event
