"""A thousand triggers in one process that is killed while they wait: after a new start all of them fire."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from airflow_steps import ROOT
from trigger_steps import store_triggers

from airflow_provider_jetstream.dev.process import Process
from testbed.face import consumer_names
from testbed.ledger import read_ledger
from testbed.queues import eventually, make_queue
from testbed.waiters import store_completions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection

pytestmark = pytest.mark.usefixtures("own_connections")

TRIGGERS = 1_000
RUNNER = Path(__file__).with_name("trigger_runner.py")


@pytest.fixture
async def queue(connection: NatsPyConnection, name: str) -> WorkQueue:
    return await make_queue(connection, name)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return tmp_path / "triggers.jsonl"


@pytest.fixture
def started() -> Iterator[list[Process]]:
    """The processes of a test, which are killed at its end."""
    processes: list[Process] = []
    yield processes
    for process in processes:
        process.kill()


def start(processes: list[Process], stored: Path, fired: Path) -> Process:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command: list[str | Path] = [sys.executable, RUNNER, stored, fired]
    process = Process.start(command, env=env, log_file=fired.with_suffix(".log"), cwd=fired.parent)
    processes.append(process)
    return process


async def all_streams_followed(connection: NatsPyConnection, queue: WorkQueue, processes: int) -> None:
    """Wait until so many processes follow the events stream, after reading what was stored."""

    async def are_following() -> bool:
        return len(await consumer_names(connection, f"{queue.name}-events")) == processes

    await eventually(are_following, within=120)


def assert_each_fired_once(jobs: list[int], events: list[dict[str, Any]]) -> None:
    assert sorted(event["trigger"] for event in events) == list(range(TRIGGERS))
    for line in events:
        event = line["event"]
        assert (event["status"], event["report"]["completed"], event["report"]["awaited"]) == ("ended", 2, 0)
        assert event["summary"] == {"job": jobs[line["trigger"]]}


@pytest.mark.slow
async def test_all_fire_after_their_process_was_killed(
    connection: NatsPyConnection, queue: WorkQueue, stored: Path, ledger: Path, started: list[Process]
) -> None:
    shared, *jobs = await store_triggers(connection, queue, stored, TRIGGERS)
    first = start(started, stored, ledger)
    await all_streams_followed(connection, queue, 1)
    # Once one has fired, all others have the end of the shared job, and wait for their own job.
    await store_completions(connection, queue, [shared, jobs[0]])
    await eventually(lambda: len(read_ledger(ledger)) == 1, within=120)
    first.kill()
    await store_completions(connection, queue, jobs[1:301])
    again = start(started, stored, ledger.with_name("again.jsonl"))
    await eventually(lambda: len(read_ledger(ledger.with_name("again.jsonl"))) == 301, within=120)
    await store_completions(connection, queue, jobs[301:])
    await eventually(lambda: not again.alive, within=120)
    assert again.returncode == 0, again.tail()
    assert len(read_ledger(ledger)) == 1
    assert_each_fired_once(jobs, read_ledger(ledger.with_name("again.jsonl")))


@pytest.mark.slow
async def test_two_processes_with_the_same_triggers_fire_the_same_events(
    connection: NatsPyConnection, queue: WorkQueue, stored: Path, ledger: Path, started: list[Process]
) -> None:
    shared, *jobs = await store_triggers(connection, queue, stored, TRIGGERS)
    paths = [ledger, ledger.with_name("beside.jsonl")]
    both = [start(started, stored, path) for path in paths]
    await store_completions(connection, queue, jobs[:400])
    await all_streams_followed(connection, queue, 2)
    await store_completions(connection, queue, [shared, *jobs[400:]])
    await eventually(lambda: not any(process.alive for process in both), within=120)
    assert [process.returncode for process in both] == [0, 0], both[0].tail()
    one, other = (sorted(read_ledger(path), key=lambda line: int(line["trigger"])) for path in paths)
    assert_each_fired_once(jobs, one)
    assert one == other
