"""A smoke of the oldest of everything: Python, dependencies and nats-server; ``make matrix`` runs much more."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

from testbed.environments import ROOT, build_wheel, create_environment, installed_packages, lowest_python
from testbed.nats_binaries import OLDER_VERSIONS, NoSuchServerError, nats_server_of
from testbed.nats_server import NatsServer

if TYPE_CHECKING:
    from pathlib import Path

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


def test_jobs_and_dead_letters_with_the_oldest_of_everything(tmp_path: Path) -> None:
    try:
        binary = nats_server_of(OLDER_VERSIONS[0])
    except NoSuchServerError as error:
        pytest.skip(str(error))
    oldest = ["--resolution", "lowest-direct", "-r", str(ROOT / "pyproject.toml"), "--extra", "metrics"]
    python = create_environment(tmp_path / "venv", lowest_python(), oldest)
    create_environment(tmp_path / "venv", python, ["--no-deps", str(build_wheel())])
    assert {"nats-py==2.12.0", "pydantic==2.11.0", "prometheus-client==0.21.0"} <= installed_packages(python)
    with NatsServer(binary=binary) as server:
        done = subprocess.run(
            [python, "-c", _PROGRAM, server.url],
            cwd=tmp_path,
            env={},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    jobs = [f"job {number}" for number in range(20)]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "completed": 18,
        "dead": 2,
        "letters": ["job 3", "job 13"],
        "uncertain": 0,
        "redriven": 2,
        "runs": sorted([*jobs, "job 3", "job 13"]),
    }
