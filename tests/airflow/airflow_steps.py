"""What the tests of the skins do again and again: wait for a state, do jobs, read a task's log."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.worker import Delivery, Worker
from testbed.workers import start_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from testbed.airflow import Airflow
    from testbed.processes import Process

# Importing Airflow writes its configuration there, which must not be a person's own; nothing above imports it.
os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="airflow-of-tests-")

ROOT = Path(__file__).resolve().parents[2]
QUEUES = Path(__file__).parent / "dags" / "queues"

_Found = TypeVar("_Found")


def wait_for(what: Callable[[], _Found | None], describe: str, timeout: float = 180.0) -> _Found:
    """Look until there is something, and say what was missing when the time is over."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.2)
    raise AssertionError(f"expected {describe} within {timeout:g} s, found none")


def task_states(airflow: Airflow, dag_id: str, run_id: str) -> dict[str, str]:
    """Give the state of every task that isn't mapped."""
    return {task["task_id"]: task["state"] for task in airflow.task_instances(dag_id, run_id)}


def wait_for_states(
    airflow: Airflow, dag_id: str, run_id: str, expected: Mapping[str, str], timeout: float = 180.0
) -> None:
    """Wait until tasks have the expected states."""
    found: dict[str, str] = {}

    def as_expected() -> bool:
        found.update(task_states(airflow, dag_id, run_id))
        return expected.items() <= found.items()

    try:
        wait_for(as_expected, f"{dict(expected)}", timeout)
    except AssertionError as error:
        raise AssertionError(f"{error}; the states were {found}") from None


def log_text(airflow: Airflow, dag_id: str, run_id: str, task_id: str, try_number: int = 1, map_index: int = -1) -> str:
    """Give a task's log as a person reads it: events and the errors they carry."""
    lines: list[str] = []
    for line in airflow.task_log(dag_id, run_id, task_id, try_number, map_index).splitlines():
        entry = json.loads(line)
        lines.append(str(entry["event"]))
        lines += [f"{error['exc_type']}: {error['exc_value']}" for error in entry.get("error_detail") or []]
    return "\n".join(lines)


def succeeded(airflow: Airflow, dag_id: str, run_id: str, timeout: float = 300.0) -> None:
    """Wait for a run's success; show the logs of what failed."""
    run = airflow.wait_for_run(dag_id, run_id, timeout)
    failed = [task for task in airflow.task_instances(dag_id, run_id) if task["state"] == "failed"]
    logs = [
        log_text(airflow, dag_id, run_id, task["task_id"], task["try_number"], task["map_index"])[-2000:]
        for task in failed[:3]
    ]
    assert run["state"] == "success", "\n".join(logs)


async def do_jobs(settings: ConnectionSettings, queue: WorkQueue, count: int, *, fail: bool = False) -> list[Delivery]:
    """Do so many deliveries of a queue with a real worker, then stop it."""
    done: list[Delivery] = []

    async def handle(job: Delivery) -> None:
        done.append(job)
        if len(done) == count:
            worker.stop()
        if fail:
            raise ValueError("this job can't be done")

    consumer = queue.consumers[0].name
    worker = Worker(queue, consumer, handle, settings)
    await asyncio.wait_for(worker.run(), 60)
    if fail:
        # The server declares a job dead only when somebody asks for the next one; this asks without taking any.
        async with connect(settings) as connection:
            request = b'{"batch":1,"no_wait":true,"max_bytes":1}'
            await connection.request(f"$JS.API.CONSUMER.MSG.NEXT.{queue.name}.{consumer}", request)
    return done


async def provisioned(settings: ConnectionSettings, queue: WorkQueue) -> WorkQueue:
    """Bring a queue into being without Airflow."""
    async with connect(settings) as connection:
        await provision(connection, queue)
    return queue


@contextmanager
def running_workers(
    settings: ConnectionSettings,
    handler: str,
    *,
    queue: Path,
    logs: Path,
    count: int = 1,
    concurrency: int = 1,
    env: Mapping[str, str] | None = None,
) -> Iterator[list[Process]]:
    """Keep workers up, each a process of its own."""
    assert settings.password is not None
    given = {
        "NATS_URL": ",".join(settings.servers),
        "NATS_USER": str(settings.user),
        "NATS_PASSWORD": settings.password.get_secret_value(),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]),
    }
    consumer = consumer_of(queue)
    workers = [
        start_worker(
            f"{queue.stem}-{number}",
            queue=queue,
            consumer=consumer,
            handler=handler,
            env={**os.environ, **given, **(env or {})},
            logs=logs,
            concurrency=concurrency,
        )
        for number in range(count)
    ]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.terminate(10)


def consumer_of(path: Path) -> str:
    """Give the name of a queue file's first consumer."""
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

    return WorkQueue.load(path).consumers[0].name


def ledger_of(path: Path) -> list[Any]:
    """Read what the workers wrote down."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
