"""The example DAGs of one capability each, run end to end with the workers of their own.

Their runs overlap: all are started before the first is awaited.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from airflow_steps import ROOT, provisioned, running_workers, succeeded

from airflow_provider_jetstream.dev.process import Process
from airflow_provider_jetstream.jetstream import (
    WorkQueue,
    find_dead_letters,
    list_redrives,
    move_due_jobs,
    resume_redrive,
)
from testbed.dead_letters import make_terminated_letters
from testbed.face import summarise_dead_letters
from testbed.ledger import read_ledger
from testbed.queues import eventually, make_queue, stored_count

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import ConnectionSettings, Redrive
    from testbed.airflow import Airflow
    from testbed.face import NatsPyConnection

QUEUES = ROOT / "example_dags" / "queues"
HANDLERS = {
    "surveys": "example_workers.surveys:send",
    "readings": "example_workers.readings:average",
    "exports": "example_workers.exports:export",
    "payments": "example_workers.payments:pay",
}
DELAY, CANARY, PAYMENTS = 8, 2, 12
CONFIGURATIONS: dict[str, dict[str, object]] = {
    "delayed_jobs": {"delay": DELAY},
    "mapped_jobs": {},
    "publish_here": {},
    "redrive_in_waves": {"still_closed": CANARY},
}


@dataclass(frozen=True)
class Workers:
    """The examples' own workers, each a process.

    :param folder: of what they record and log
    """

    folder: Path
    settings: ConnectionSettings
    stack: ExitStack

    def start(self, queue: str) -> None:
        """Start the worker of a queue; it ends with the tests of this file."""
        ledger = {f"{queue.upper()}_LEDGER": str(self.folder / f"{queue}.jsonl")}
        self.stack.enter_context(
            running_workers(
                self.settings, HANDLERS[queue], queue=QUEUES / f"{queue}.yaml", logs=self.folder, env=ledger
            )
        )

    def start_mover(self, queue: str) -> None:
        """Move the jobs of a queue that are due, until the tests of this file end."""
        program = [sys.executable, "-m", "airflow_provider_jetstream.command.program", "schedules", "run"]
        command = [*program, str(QUEUES / f"{queue}.yaml"), "--server", self.settings.servers[0]]
        mover = Process.start(command, log_file=self.folder / f"{queue}-mover.log")
        self.stack.callback(mover.terminate)

    def done(self, queue: str) -> list[Any]:
        """Return what the worker of a queue has recorded."""
        return read_ledger(self.folder / f"{queue}.jsonl")


@pytest.fixture(scope="module")
def workers(settings: ConnectionSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    with ExitStack() as stack:
        yield Workers(tmp_path_factory.mktemp("examples"), settings, stack)


@pytest.fixture(scope="module")
def runs(airflow: Airflow, settings: ConnectionSettings, workers: Workers) -> dict[str, str]:
    """Start a run of each DAG, and return the runs' ids."""
    for queue in HANDLERS:
        # A worker ends where its queue isn't there.
        asyncio.run(provisioned(settings, WorkQueue.load(QUEUES / f"{queue}.yaml")))
    airflow.wait_for_dags(*CONFIGURATIONS, "wait_there")
    started = {dag_id: airflow.trigger(dag_id, conf) for dag_id, conf in CONFIGURATIONS.items()}
    for queue in ("payments", "readings", "surveys"):
        workers.start(queue)
    workers.start_mover("surveys")
    # No job of this DAG begins before its run has ended.
    succeeded(airflow, "publish_here", started["publish_here"])
    assert [run["state"] in ("queued", "running") for run in airflow.runs("wait_there")] == [True]
    workers.start("exports")
    return started


async def test_waves_stop_at_the_gate_after_a_canary_that_dies_again_until_a_person_resumes(
    airflow: Airflow, connection: NatsPyConnection, runs: dict[str, str], workers: Workers
) -> None:
    run_id = runs["redrive_in_waves"]
    queue = WorkQueue.load(QUEUES / "payments.yaml")

    async def at_gate() -> Redrive | None:
        return next((found for found in await list_redrives(connection, queue) if found.state == "at_gate"), None)

    stopped = await eventually(at_gate, 120)
    assert (stopped.redriven, stopped.outcomes.died_again, stopped.who["run_id"]) == (CANARY, CANARY, run_id)
    assert workers.done("payments") == []
    await resume_redrive(connection, queue, stopped.id, who="Ann Lee", why="the bank has opened")
    await asyncio.to_thread(succeeded, airflow, "redrive_in_waves", run_id)

    published = airflow.xcom("redrive_in_waves", run_id, "publish")
    assert (published["published"], published["dead"]) == (PAYMENTS, PAYMENTS)
    result = airflow.xcom("redrive_in_waves", run_id, "redrive")
    assert (result["redrive"], result["state"]) == (stopped.id, "finished")
    assert result["outcomes"] == {"completed": PAYMENTS, "died_again": 0, "still_running": 0, "unknown": 0}
    waves = [(wave["redriven"], wave["outcomes"]["completed"], wave["passed_by"]) for wave in result["waves"]]
    # The two payments of the canary come back once more with a later wave.
    assert waves == [(CANARY, 0, "Ann Lee"), (4, 4, "rule"), (8, 8, "rule")]
    assert Counter(line["payment"] for line in workers.done("payments")) == {
        f"payment-{number}": 1 for number in range(PAYMENTS)
    }
    assert (await summarise_dead_letters(connection, queue)).dead == 0


def test_one_dag_publishes_and_ends_and_another_one_waits_for_its_jobs(
    airflow: Airflow, runs: dict[str, str], workers: Workers
) -> None:
    published = airflow.xcom("publish_here", runs["publish_here"], "publish")
    (waiting,) = [run["dag_run_id"] for run in airflow.runs("wait_there")]
    succeeded(airflow, "wait_there", waiting)

    ended = airflow.xcom("wait_there", waiting, "wait")
    assert (ended["jobs"], ended["completed"], ended["awaited"]) == (3, 3, 0)
    assert ended["completed_sequences"] == published["sequences"]
    tables = ["customers", "orders", "payments"]
    assert airflow.xcom("wait_there", waiting, "files") == [f"{table}.csv" for table in tables]
    assert Counter(line["table"] for line in workers.done("exports")) == dict.fromkeys(tables, 1)


def test_each_mapped_task_waits_for_its_own_jobs_and_a_task_is_mapped_over_some_of_them(
    airflow: Airflow, runs: dict[str, str], workers: Workers
) -> None:
    run_id = runs["mapped_jobs"]
    succeeded(airflow, "mapped_jobs", run_id)
    instances = Counter(
        (task["task_id"], task["state"], task["try_number"]) for task in airflow.task_instances("mapped_jobs", run_id)
    )
    assert {task_id: count for (task_id, *ended), count in instances.items() if ended == ["success", 1]} == {
        "provision": 1,
        "stations": 1,
        "average": 3,
        "frosty": 1,
        "warn": 2,
    }
    reports = [airflow.xcom("mapped_jobs", run_id, "average", map_index=number) for number in range(3)]
    assert [[(job["id"], job["result"]["average"]) for job in station] for station in reports] == [
        [("graz-monday", 6.0), ("graz-tuesday", -1.5)],
        [("linz-monday", 3.5)],
        [("wien-monday", 5.0), ("wien-tuesday", 5.0), ("wien-wednesday", -3.5)],
    ]
    warnings = [airflow.xcom("mapped_jobs", run_id, "warn", map_index=number) for number in range(2)]
    assert warnings == ["graz-tuesday: -1.5 °C", "wien-wednesday: -3.5 °C"]
    days = [job["id"] for station in reports for job in station]
    assert Counter(line["day"] for line in workers.done("readings")) == dict.fromkeys(days, 1)


async def test_delayed_jobs_are_done_once_and_not_before_their_time_and_a_cancelled_one_never(
    airflow: Airflow, connection: NatsPyConnection, runs: dict[str, str], workers: Workers
) -> None:
    run_id = runs["delayed_jobs"]
    await asyncio.to_thread(succeeded, airflow, "delayed_jobs", run_id)
    published = airflow.xcom("delayed_jobs", run_id, "publish")
    assert (published["published"], published["scheduled"]) == (3, 3)
    assert airflow.xcom("delayed_jobs", run_id, "withdraw") == {"cancelled": 1, "schedules": 1}

    async def nothing_is_left() -> bool:
        streams = ("surveys", "surveys-schedules")
        return [await stored_count(connection, stream) for stream in streams] == [0, 0]

    stop = asyncio.Event()
    queue = WorkQueue.load(QUEUES / "surveys.yaml")
    moving = asyncio.create_task(move_due_jobs(connection, queue, stop=stop))
    await eventually(nothing_is_left, 60)
    stop.set()
    await moving
    sent = {line["to"]: datetime.fromisoformat(line["sent_at"]) for line in workers.done("surveys")}
    assert len(workers.done("surveys")) == len(sent)
    tasks = {task["task_id"]: task for task in airflow.task_instances("delayed_jobs", run_id)}
    # One delay begins when the job is published, the other one with the run.
    begun = {
        "ada": tasks["publish"]["start_date"],
        "alan": airflow.run("delayed_jobs", run_id)["run_after"],
    }
    assert set(sent) == set(begun)
    for to, since in begun.items():
        assert sent[to] >= datetime.fromisoformat(since) + timedelta(seconds=DELAY), to


async def test_letters_that_a_policy_keeps_no_longer_are_discarded(
    airflow: Airflow, connection: NatsPyConnection, tmp_path: Path
) -> None:
    letters = {"name": "refunds-dead", "keep": {"max_deliveries": "1ms", "terminated": "7d"}}
    queue = await make_queue(connection, "refunds", dead_letters=letters, dead=["a", "b"])
    await make_terminated_letters(connection, queue, ["kept"])
    file = tmp_path / "refunds.yaml"
    file.write_text(queue.to_yaml())
    await asyncio.to_thread(airflow.wait_for_dags, "letter_retention")
    run_id = airflow.trigger("letter_retention", {"queue": str(file)})
    await asyncio.to_thread(succeeded, airflow, "letter_retention", run_id)
    result = airflow.xcom("letter_retention", run_id, "apply")
    assert (result["discarded"], result["redriven"], result["state"]) == (2, 0, "finished")
    assert [letter.sequence for letter in (await find_dead_letters(connection, queue)).letters] == [3]
    (redrive,) = await list_redrives(connection, queue)
    assert redrive.why == "by policy: max_deliveries 1ms, terminated 7d; every night"
    assert redrive.who["run_id"] == run_id
