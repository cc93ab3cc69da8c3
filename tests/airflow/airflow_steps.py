"""Steps of the tests: wait for a state, process jobs, read a task's log."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

from airflow_provider_jetstream.dev.worker_processes import start_worker
from airflow_provider_jetstream.jetstream import connect, provision
from airflow_provider_jetstream.worker import Delivery, Worker
from testbed.ports import LOOPBACK
from testbed.received_stats import received_statsd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from airflow_provider_jetstream.dev.process import Process
    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from testbed.airflow import Airflow
    from testbed.received_stats import ReceivedGauges

# Importing Airflow writes its configuration there, which must not be a person's own folder; nothing above imports it.
os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="airflow-of-tests-")

ROOT = Path(__file__).resolve().parents[2]
_END_STATES = {"success", "failed", "skipped", "upstream_failed", "removed"}
QUEUES = Path(__file__).parent / "dags" / "queues"

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Secrets:
    """The secrets that must not appear anywhere in Airflow's home."""

    password: str
    token: str
    wrong_password: str
    wrong_token: str
    in_host: str
    in_extra: str

    def all(self) -> tuple[str, ...]:
        """Return every secret."""
        return (self.password, self.token, self.wrong_password, self.wrong_token, self.in_host, self.in_extra)


def wait_for(condition: Callable[[], _Result | None], expected: str, timeout: float = 180.0) -> _Result:
    """Poll until the condition returns something true, and return that."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.2)
    raise AssertionError(f"expected {expected} within {timeout:g} s, found none")


def task_states(airflow: Airflow, dag_id: str, run_id: str) -> dict[str, str]:
    """Return the state of every task that isn't mapped."""
    return {task["task_id"]: task["state"] for task in airflow.task_instances(dag_id, run_id)}


def wait_for_states(
    airflow: Airflow, dag_id: str, run_id: str, expected: Mapping[str, str], timeout: float = 180.0
) -> None:
    """Wait until tasks have the expected states; fail as soon as one has ended otherwise."""
    states: dict[str, str] = {}

    def as_expected() -> bool:
        states.update(task_states(airflow, dag_id, run_id))
        for task_id, state in expected.items():
            ended = states.get(task_id) if states.get(task_id) in _END_STATES else state
            assert ended == state, f"expected {dict(expected)}, found {states}"
        return expected.items() <= states.items()

    try:
        wait_for(as_expected, f"{dict(expected)}", timeout)
    except AssertionError as error:
        raise AssertionError(f"{error}; the states were {states}") from None


def log_text(airflow: Airflow, dag_id: str, run_id: str, task_id: str, try_number: int = 1, map_index: int = -1) -> str:
    """Return the lines of a task's log: events and their errors."""
    lines: list[str] = []
    for line in airflow.task_log(dag_id, run_id, task_id, try_number, map_index).splitlines():
        entry = json.loads(line)
        lines.append(str(entry["event"]))
        lines += [f"{error['exc_type']}: {error['exc_value']}" for error in entry.get("error_detail") or []]
    return "\n".join(lines)


def succeeded(airflow: Airflow, dag_id: str, run_id: str, timeout: float = 300.0) -> None:
    """Wait for a run's success; if it fails, show the logs of the failed tasks."""
    run = airflow.wait_for_run(dag_id, run_id, timeout)
    failed = [task for task in airflow.task_instances(dag_id, run_id) if task["state"] == "failed"]
    logs = [
        log_text(airflow, dag_id, run_id, task["task_id"], task["try_number"], task["map_index"])[-2000:]
        for task in failed[:3]
    ]
    assert run["state"] == "success", "\n".join(logs)


async def process_jobs(
    settings: ConnectionSettings, queue: WorkQueue, count: int, *, fail: bool = False
) -> list[Delivery]:
    """Process so many deliveries of a queue with a real worker, then stop it."""
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
        # The server publishes the advisory of a dead letter only at the next pull; this one pulls no job.
        async with connect(settings) as connection:
            request = b'{"batch":1,"no_wait":true,"max_bytes":1}'
            await connection.request(f"$JS.API.CONSUMER.MSG.NEXT.{queue.name}.{consumer}", request)
    return done


async def provisioned(settings: ConnectionSettings, queue: WorkQueue) -> WorkQueue:
    """Provision a queue without Airflow."""
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
    consumer: str | None = None,
    count: int = 1,
    concurrency: int = 1,
    env: Mapping[str, str] | None = None,
) -> Iterator[list[Process]]:
    """Run workers, each in a process of its own."""
    assert settings.password is not None
    credentials = {
        "NATS_URL": ",".join(settings.servers),
        "NATS_USER": str(settings.user),
        "NATS_PASSWORD": settings.password.get_secret_value(),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]),
    }
    consumer = consumer or consumer_of(queue)
    workers = [
        start_worker(
            f"{queue.stem}-{consumer}-{number}",
            queue=queue,
            consumer=consumer,
            handler=handler,
            env={**os.environ, **credentials, **(env or {})},
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
    """Return the name of a queue file's first consumer."""
    from airflow_provider_jetstream.jetstream import WorkQueue

    return WorkQueue.load(path).consumers[0].name


def statsd(port: int) -> dict[str, str]:
    """Return the environment in which Airflow sends its stats to StatsD."""
    return {
        "AIRFLOW__METRICS__STATSD_ON": "True",
        "AIRFLOW__METRICS__STATSD_HOST": LOOPBACK,
        "AIRFLOW__METRICS__STATSD_PORT": str(port),
    }


@contextmanager
def own_statsd() -> Iterator[ReceivedGauges]:
    """Receive the stats that this process sends, set up as that of a task is."""
    from airflow.sdk._shared.observability.metrics import stats
    from airflow.sdk.observability.metrics import stats_utils

    with received_statsd() as gauges, pytest.MonkeyPatch.context() as patched:
        for variable, value in statsd(gauges.port).items():
            patched.setenv(variable, value)
        stats.initialize(factory=stats_utils.get_stats_factory(), export_legacy_names=True)
        try:
            yield gauges
        finally:
            patched.undo()
            stats.initialize(factory=stats_utils.get_stats_factory(), export_legacy_names=True)
