"""The example DAGs of the source documents, with the workers and handlers that the documents have.

Their runs overlap: all are started before the first is awaited. ``image_conversion`` has the long names of
``dags/long_names.py``.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from airflow_steps import (
    ROOT,
    provisioned,
    running_workers,
    succeeded,
    task_states,
    wait_for,
    wait_for_states,
)
from dags.long_names import CONVERT_ID, DAG_ID
from PIL import Image

from airflow_provider_jetstream.jetstream import Selection, WorkQueue, connect, find_dead_letters
from testbed.face import stream_info
from testbed.foreign_programs import LEDGER, start_program
from testbed.ledger import read_ledger
from testbed.queues import eventually, until_stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from airflow_provider_jetstream.dev.process import Process
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.airflow import Airflow
    from testbed.face import NatsPyConnection

QUEUES = ROOT / "example_dags" / "queues"
LONG_RUN_ID = "manual__2026-11-22T10:30:00.000000+00:00__edition-de-0000042"
IMAGES = 3
JOBS, PUBLISHERS = 40, 2
TASKS = 30
FIRST_TASKS = 200
TYPES = ("email", "resize", "notify")
_BEGUN = {"running", "success", "failed"}


@dataclass(frozen=True)
class Programs:
    """Programs that run beside the DAGs.

    :param folder: of what they record and log
    :param start: starts one as :func:`start_program` does
    """

    folder: Path
    start: Callable[..., Process]

    @property
    def ledger(self) -> Path:
        """The file in which the documents' programs record what they have done."""
        return self.folder / "foreign.jsonl"


@pytest.fixture(scope="module")
def programs(settings: ConnectionSettings) -> Iterator[Programs]:
    assert settings.password is not None
    # Not pytest's folder: a request has to name an image in at most 512 bytes with all headers.
    folder = Path(tempfile.mkdtemp(prefix="documents-"))
    env = {
        "NATS_URL": settings.servers[0],
        "NATS_USER": str(settings.user),
        "NATS_PASSWORD": settings.password.get_secret_value(),
        "OUTDIR": str(folder / "output"),
        LEDGER: str(folder / "foreign.jsonl"),
        # So slow that the first tasks aren't done when provisioning begins.
        "TASK_SECONDS": "0.05",
    }
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)

        def start(name: str, module: str, *arguments: str, restarted: bool = False) -> Process:
            process = start_program(name, module, *arguments, env=env, logs=folder, restarted=restarted)
            stack.callback(process.terminate)
            return process

        yield Programs(folder, start)


@pytest.fixture(scope="module")
def runs(airflow: Airflow, settings: ConnectionSettings, programs: Programs) -> dict[str, str]:
    """Start a run of each DAG but ``orders``, and return the runs' ids."""
    asyncio.run(publish_first_tasks(settings))
    (programs.folder / "input").mkdir()
    (programs.folder / "output").mkdir()
    for number in range(IMAGES):
        Image.new("RGB", (64, 48), (number * 30, 255, 128)).save(programs.folder / "input" / f"{number}.jpg")
    configurations: dict[str, dict[str, object]] = {
        DAG_ID: {"input": str(programs.folder / "input")},
        "priority_jobs": {"jobs": JOBS, "publishers": PUBLISHERS, "bad": 1},
        "partitioned_tasks": {"tasks": TASKS},
    }
    airflow.wait_for_dags(*configurations)
    started = {
        dag_id: airflow.trigger(dag_id, conf, run_id=LONG_RUN_ID if dag_id == DAG_ID else None)
        for dag_id, conf in configurations.items()
    }

    def is_provisioning() -> bool:
        return task_states(airflow, "partitioned_tasks", started["partitioned_tasks"]).get("provision") in _BEGUN

    wait_for(is_provisioning, "the task provision to begin")
    for number in range(2):
        programs.start(f"worker-{number}", "foreign_tasks", "bind", "worker")
    return started


async def test_images_are_converted_by_the_documents_worker_and_a_dead_request_is_redriven(
    airflow: Airflow, connection: NatsPyConnection, runs: dict[str, str], programs: Programs
) -> None:
    assert {len(name) for name in (DAG_ID, runs[DAG_ID], CONVERT_ID)} == {60}
    wait_for_states(airflow, DAG_ID, runs[DAG_ID], {"provision": "success"})
    programs.start("bw", "foreign_images", restarted=True)
    succeeded(airflow, DAG_ID, runs[DAG_ID], timeout=180)

    published = airflow.xcom(DAG_ID, runs[DAG_ID], CONVERT_ID)
    assert (published["published"], published["completed"], published["dead"]) == (IMAGES + 2, IMAGES, 2)
    dead = airflow.xcom(DAG_ID, runs[DAG_ID], "read")
    (poison,), (late,) = dead["poison"], dead["late"]
    assert dead["bodies"][str(poison)] == "{}"
    redriven = airflow.xcom(DAG_ID, runs[DAG_ID], "redrive")
    assert (redriven["redriven"], redriven["completed"]) == (1, 1)
    requests = airflow.xcom(DAG_ID, runs[DAG_ID], "requests")
    converted = [request["id"] for request in requests if request]
    assert Counter(line["converted"] for line in read_ledger(programs.ledger) if "converted" in line) == dict.fromkeys(
        converted, 1
    )
    assert json.loads(dead["bodies"][str(late)])["id"] in converted
    for job_id in converted:
        with Image.open(programs.folder / "output" / f"{job_id}.jpg") as image:
            assert (image.mode, image.size) == ("L", (64, 48))
    (letter,) = (
        await find_dead_letters(connection, WorkQueue.load(QUEUES / "images.yaml"), Selection(parked=True))
    ).letters
    assert (letter.sequence, letter.parked) == (poison, "it names no image")
    assert letter.origin is not None
    assert (letter.origin.dag_id, letter.origin.run_id, letter.origin.task_id) == (DAG_ID, LONG_RUN_ID, CONVERT_ID)


async def test_jobs_of_two_priorities_are_done_by_both_kinds_of_workers(
    airflow: Airflow, settings: ConnectionSettings, runs: dict[str, str], programs: Programs
) -> None:
    run_id = runs["priority_jobs"]
    wait_for_states(airflow, "priority_jobs", run_id, {"provision": "success"})
    for priority in ("high", "low"):
        programs.start(f"{priority}-theirs", "foreign_jobs", "work", priority, "theirs")
    own = programs.folder / "jobs.jsonl"
    with ExitStack() as stack:
        for priority in ("high", "low"):
            stack.enter_context(
                running_workers(
                    settings,
                    "example_workers.jobs:process",
                    queue=QUEUES / "jobs.yaml",
                    consumer=priority,
                    logs=programs.folder,
                    env={"JOBS_LEDGER": str(own)},
                )
            )
        succeeded(airflow, "priority_jobs", run_id, timeout=180)
    report = airflow.xcom("priority_jobs", run_id, "report")
    done = Counter(line["sequence"] for line in read_ledger(programs.ledger) if "worker" in line and "task" not in line)
    done += Counter(line["sequence"] for line in read_ledger(own))
    assert report["completed"] == {"high": JOBS, "low": JOBS}
    assert [letter["deliveries"] for letter in report["dead"]] == [3]
    assert set(done.values()) == {1}
    assert sum(done.values()) == 2 * JOBS


async def test_tasks_of_one_consumer_and_of_the_partitions_that_follow_it_are_done_once_each(
    airflow: Airflow,
    settings: ConnectionSettings,
    connection: NatsPyConnection,
    runs: dict[str, str],
    programs: Programs,
) -> None:
    run_id = runs["partitioned_tasks"]
    wait_for_states(airflow, "partitioned_tasks", run_id, {"provision": "success"})
    first = [line["task"] for line in read_ledger(programs.ledger) if "task" in line]
    assert Counter(first) == dict.fromkeys(first_tasks(), 1)
    # Theirs for one partition, ours for the others.
    programs.start("worker-0", "foreign_tasks", "bind", "worker-0")
    results = programs.folder / "results"
    results.mkdir()
    with ExitStack() as stack:
        for number in (1, 2):
            stack.enter_context(
                running_workers(
                    settings,
                    "example_workers.tasks:process",
                    queue=QUEUES / "tasks.yaml",
                    consumer=f"worker-{number}",
                    logs=programs.folder,
                    env={"TASKS_RESULTS": str(results)},
                )
            )
        succeeded(airflow, "partitioned_tasks", run_id, timeout=180)
        await until_stored(connection, "TASKS", 0, within=60)
    published = airflow.xcom("partitioned_tasks", run_id, "publish")
    assert (published["published"], published["completed"]) == (TASKS, TASKS)
    theirs = [line["task"] for line in read_ledger(programs.ledger) if "task" in line]
    ours = [json.loads(path.read_text())["task"] for path in results.iterdir()]
    expected = [f"{TYPES[number % 3]} {number}" for number in range(TASKS)] + first_tasks()
    assert Counter(theirs + ours) == dict.fromkeys(expected, 1)


def first_tasks() -> list[str]:
    """Return the tasks that are stored before there are partitions."""
    return [f"first {number}" for number in range(FIRST_TASKS)]


async def publish_first_tasks(settings: ConnectionSettings) -> None:
    await provisioned(settings, WorkQueue.load(QUEUES / "tasks_unpartitioned.yaml"))
    async with connect(settings) as connection:
        for number, task in enumerate(first_tasks()):
            await connection.client.jetstream().publish(f"tasks.{TYPES[number % 3]}", task.encode())


async def test_each_of_twenty_orders_is_done_once_by_consumer_handler_or_redrive(
    airflow: Airflow, settings: ConnectionSettings, connection: NatsPyConnection, programs: Programs
) -> None:
    queue = WorkQueue.load(QUEUES / "orders.yaml")
    await provisioned(settings, queue)
    airflow.wait_for_dags("orders")
    before = int((await stream_info(connection, queue.name))["state"]["last_seq"])
    run_id = airflow.trigger("orders", {"redrive_rate": 1})
    programs.start("consumer", "foreign_orders", "process", "orders_stream", "orders.*", "1")

    async def has_copies() -> bool:
        return int((await stream_info(connection, queue.name))["state"]["last_seq"]) > before + 20

    # In the middle of the redrive.
    await eventually(has_copies, within=120)
    handler = programs.start("handler", "foreign_orders", "handle", "orders_unprocessed", "orders_stream")
    succeeded(airflow, "orders", run_id, timeout=180)
    lines = [line for line in read_ledger(programs.ledger) if line.keys() & {"processed", "handled"}]
    done = Counter(line.get("processed") or line.get("handled") for line in lines)
    assert done == {f"order-{number}": 1 for number in range(20)}
    result = airflow.xcom("orders", run_id, "all_done")
    assert (result["completed"], result["handled"]) == tuple(
        sum(kind in line for line in lines) for kind in ("processed", "handled")
    )
    assert handler.alive, handler.tail()
    assert not (await find_dead_letters(connection, queue)).letters
