"""A smoke of the oldest of everything: Python, dependencies and nats-server; ``make matrix`` runs much more."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from testbed.environments import ROOT, build_wheel, create_environment, installed_packages, lowest_python
from testbed.nats_binaries import OLDER_VERSIONS, NoSuchServerError, nats_server_of
from testbed.nats_server import NatsServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.group("environment with the oldest versions")

_PROGRAM = """
import asyncio
import json
import sys

from airflow_provider_jetstream.jetstream import (
    Consumer, Job, WaitPolicy, WorkQueue, connect, connection_settings, find_dead_letters, provision, publish,
    redrive_dead_letters, take_cursor, wait,
)
from airflow_provider_jetstream.worker import Delivery, GiveUpError, Worker

ROOM = {"closed": True}


async def main(url):
    settings = connection_settings({"servers": (url,), "timeout": 10})
    queue = WorkQueue(
        name="tasks", subjects=["tasks.jobs.>"], dead_letters="tasks_dlq", events="tasks_events",
        consumers=[Consumer(name="worker", filter_subject="tasks.jobs.>", max_deliver=3)],
    )
    runs = []

    def work(job: Delivery) -> None:
        runs.append(job.body.decode())
        if job.body.endswith(b"3") and ROOM["closed"]:
            raise GiveUpError("no room")

    async with connect(settings) as connection:
        await provision(connection, queue)
        worker = Worker(queue, "worker", work, settings)
        working = asyncio.create_task(worker.run())
        jobs = [Job(f"job {number}".encode(), id=str(number)) for number in range(20)]
        cursor = await take_cursor(connection, queue)
        published = await publish(connection, queue, jobs, subject="tasks.jobs.plain")
        report = await wait(connection, cursor, published.sequences, policy=WaitPolicy(max_dead=None))
        found = await find_dead_letters(connection, queue)
        ROOM["closed"] = False
        redriven = await redrive_dead_letters(connection, queue)
        while len(runs) < 22:
            await asyncio.sleep(0.05)
        worker.stop()
        await working
    print(json.dumps({
        "completed": len(report.completed), "dead": len(report.dead), "runs": sorted(runs),
        "letters": [letter.body.decode() for letter in found.letters], "uncertain": found.uncertain,
        "redriven": len(redriven.redriven),
    }))


asyncio.run(asyncio.wait_for(main(sys.argv[1]), 120))
"""


# Cancels a task at many moments of its connecting and of its requests. Where a cancellation is lost, the task goes on.
_CANCELLED = """
import asyncio
import json
import sys

from airflow_provider_jetstream.jetstream import connect, connection_settings


async def use(settings, used):
    async with connect(settings) as connection:
        used.set()
        while True:
            await connection.api("INFO")


async def main(url):
    settings, going_on = connection_settings({"servers": (url,), "timeout": 10}), 0
    for moment in range(100):
        used = asyncio.Event()
        task = asyncio.create_task(use(settings, used))
        if moment >= 60:
            await used.wait()
        for _ in range(moment % 60):
            await asyncio.sleep(0.0005 if moment % 2 else 0)
        task.cancel()
        await asyncio.wait({task}, timeout=2)
        if not task.done():
            going_on += 1
            task.cancel()
    print(json.dumps({"going on": going_on}))


asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    """The oldest server that is supported."""
    try:
        binary = nats_server_of(OLDER_VERSIONS[0])
    except NoSuchServerError as error:
        pytest.skip(str(error))
    with NatsServer(binary=binary) as started:
        yield started


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the lowest versions that pyproject.toml allows."""
    folder = tmp_path_factory.mktemp("oldest") / "venv"
    lowest = ["--resolution", "lowest-direct", "-r", str(ROOT / "pyproject.toml"), "--extra", "metrics"]
    python = create_environment(folder, lowest_python(), lowest)
    return create_environment(folder, python, ["--no-deps", str(build_wheel())])


def run(python: Path, program: str, url: str, folder: Path) -> Any:
    """Run a program that prints one line of JSON."""
    command = [str(python), "-c", program, url]
    done = subprocess.run(command, cwd=folder, env={}, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_cancelled_task_ends_wherever_it_is(server: NatsServer, oldest: Path, tmp_path: Path) -> None:
    assert run(oldest, _CANCELLED, server.url, tmp_path) == {"going on": 0}


def test_jobs_and_dead_letters(server: NatsServer, oldest: Path, tmp_path: Path) -> None:
    assert {"nats-py==2.14.0", "pydantic==2.11.0", "prometheus-client==0.21.0"} <= installed_packages(oldest)
    jobs = [f"job {number}" for number in range(20)]
    assert run(oldest, _PROGRAM, server.url, tmp_path) == {
        "completed": 18,
        "dead": 2,
        "letters": ["job 3", "job 13"],
        "uncertain": 0,
        "redriven": 2,
        "runs": sorted([*jobs, "job 3", "job 13"]),
    }
