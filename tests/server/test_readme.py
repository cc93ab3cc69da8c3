"""The README's code runs, as it stands there."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.jetstream.publishing.job import prepare_jobs
from airflow_provider_jetstream.jetstream.publishing.publisher import publish_prepared
from airflow_provider_jetstream.jetstream.redrive.redrive import redrive_dead_letters
from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest
from airflow_provider_jetstream.jetstream.waiting.cursor import take_cursor
from airflow_provider_jetstream.jetstream.waiting.wait import wait
from testbed.queues import drain, let_die, make_queue
from testbed.workers import start_worker

if TYPE_CHECKING:
    from airflow.sdk import DAG

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from testbed.nats_server import NatsServer

ROOT = Path(__file__).resolve().parent.parent.parent


def _block(heading: str) -> str:
    section = (ROOT / "README.md").read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found, f"the README has no Python under {heading!r}"
    return found[1]


@pytest.fixture(scope="module")
def dag_block() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(_block("A DAG"), "README.md", "exec"), names)
    return names


def test_the_dag_has_its_three_tasks_in_a_row(dag_block: dict[str, Any]) -> None:
    dag: DAG = dag_block["dag"]
    assert [task.task_id for task in dag.topological_sort()] == ["provision", "send", "retry_dead_letters"]


async def test_the_dag_of_dead_letters_repairs_those_it_names(
    dag_block: dict[str, Any], connection: Connection, name: str
) -> None:
    names = dict(dag_block)
    exec(compile(_block("Dead letters"), "README.md", "exec"), names)
    dag: DAG = names["dag"]
    assert [task.task_id for task in dag.topological_sort()] == ["found", "repair"]
    operator = dag.get_task("repair")
    queue = await make_queue(connection, name)
    await let_die(connection, queue, ['{"to": "ADA@EXAMPLE.ORG"}'])
    order = RedriveRequest(transform=operator.transform, rate=operator.rate, max_redrives=operator.max_redrives)
    assert (await redrive_dead_letters(connection, queue, order)).redriven == {1: 2}
    assert await drain(connection, queue) == {'{"to":"ada@example.org"}': 1}


async def test_the_worker_does_the_jobs_of_the_dag(
    dag_block: dict[str, Any], nats: NatsServer, tmp_path: Path, connection: Connection
) -> None:
    queue: WorkQueue = dag_block["EMAILS"]
    (tmp_path / "emails.yaml").write_text(yaml.safe_dump(queue.model_dump(mode="json", exclude_unset=True)))
    (tmp_path / "mailer.py").write_text(_block("A worker"))
    env = {**os.environ, "NATS_URL": nats.url, "PYTHONPATH": str(tmp_path)}

    await provision(connection, queue)
    worker = start_worker(
        "mailer", queue=tmp_path / "emails.yaml", consumer="sender", handler="mailer:send", env=env, logs=tmp_path
    )
    try:
        task = dag_block["send"]
        mark = await take_cursor(connection, queue)
        jobs = prepare_jobs(list(task.jobs), subject=task.subject, origin=None, batch="readme")
        report = await publish_prepared(connection, jobs)
        async with asyncio.timeout(30):
            ended = await wait(connection, mark, report.sequences)
    finally:
        worker.terminate()
    assert len(ended.completed) == 2


def test_the_session_without_airflow_prints_what_it_did(nats: NatsServer) -> None:
    program = _block("Without Airflow").replace("nats://127.0.0.1:4222", nats.url)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "orders_stream/processor" in done.stdout
    assert "0 dead letters" in done.stdout
