"""W6: what a wait in a real Airflow costs beyond its job: on the slot while the job is about to end, or deferred.

Each round is a run of a DAG whose tasks publish one job each and wait for it, deferrable, all at once; a worker outside
of Airflow sleeps for the job's time. A figure is from the moment at which the handler returns until Airflow's own
`end_date` of the task. The task that defers at once shows Airflow's time to resume: its job ends long after the
guard against early events, so the trigger's event follows within milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.settings import connection_settings
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.worker.worker import Worker
from benchmarks.report import Goal, Sample, Table, Way, Workload, run_workload
from testbed.airflow import Airflow
from testbed.nats_server import NatsServer
from testbed.ports import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.worker.delivery import Delivery

DAG = "short_waits"
# Seconds of each task's job; the last one defers at once.
TASKS: Mapping[str, float] = {"wait_2_s": 2.0, "wait_5_s": 5.0, "wait_10_s": 10.0, "deferred": 25.0}
_COST = "cost s"
_ROUNDS = 5
_MOST_SECONDS = 180.0
_DAG_FILE = """
from airflow.sdk import DAG
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator

with DAG("{dag}", schedule=None):
    for name in {tasks}:
        JetStreamPublishOperator(
            task_id=name, work_queue={declarations}[name], subject=name, jobs=[{{"id": "{{{{ run_id }}}}"}}],
            wait_for_completion=True, deferrable=True, defer_after=0 if name == "deferred" else None,
        )
"""


def _declaration(name: str) -> dict[str, object]:
    return {
        "name": name,
        "subjects": [name],
        "consumers": [{"name": "worker", "max_deliver": 1, "ack_wait": "1m"}],
        "events": f"{name}-events",
    }


def main() -> int:
    """Measure the workload."""
    return run_workload(measure, __doc__)


def measure(short: bool) -> Workload:  # noqa: FBT001
    """Measure all tasks."""
    rounds = 1 if short else _ROUNDS
    with tempfile.TemporaryDirectory() as name, NatsServer(Path(name) / "nats") as server:
        folder = Path(name) / "dags"
        folder.mkdir()
        declarations = {task: _declaration(task) for task in TASKS}
        dag = _DAG_FILE.format(dag=DAG, tasks=list(TASKS), declarations=declarations)
        (folder / "short_waits.py").write_text(dag, encoding="utf-8")
        connection = json.dumps({"conn_type": "nats", "host": LOOPBACK, "port": server.port})
        with Airflow(Path(name) / "airflow", folder, connections={"nats_default": connection}) as airflow:
            airflow.wait_for_dags(DAG)
            samples = asyncio.run(_measure(server.url, airflow, rounds))
    ways = [Way(task, samples[task]) for task in TASKS]
    goals = [
        Goal(f"seconds beyond a job of {seconds:g} s", way.extra(_COST), 2.0, at_most=True)
        for way, seconds in zip(ways, TASKS.values(), strict=True)
        if way.name != "deferred"
    ]
    table = Table("task", "tasks", ways)
    return Workload("W6", "Short waits in Airflow", "short_waits", __doc__ or "", [table], goals)


async def _measure(url: str, airflow: Airflow, rounds: int) -> dict[str, list[Sample]]:
    ended_at: dict[str, float] = {}
    settings = connection_settings({"servers": (url,)})

    def worker(name: str, seconds: float) -> Worker:
        async def handle(_: Delivery) -> None:
            await asyncio.sleep(seconds)
            ended_at[name] = time.time()

        return Worker(_declaration(name), "worker", handle, settings)

    async with connect(settings) as connection:
        for name in TASKS:
            await provision(connection, WorkQueue.load(_declaration(name)))
    samples: dict[str, list[Sample]] = {name: [] for name in TASKS}
    workers = [worker(name, seconds) for name, seconds in TASKS.items()]
    running = [asyncio.create_task(each.run()) for each in workers]
    for turn in range(1, rounds + 1):
        print(f"round {turn} of {rounds}", file=sys.stderr, flush=True)
        run_id = f"round-{turn}"
        began = time.time()
        airflow.trigger(DAG, run_id=run_id)
        await asyncio.to_thread(airflow.wait_for_run, DAG, run_id, timeout=_MOST_SECONDS)
        for task in airflow.task_instances(DAG, run_id):
            if task["state"] != "success":
                raise SystemExit(f"expected every task to succeed, found {task['task_id']} {task['state']}")
            name, end = task["task_id"], datetime.fromisoformat(task["end_date"]).timestamp()
            figures = {"job s": TASKS[name], _COST: end - ended_at.pop(name)}
            samples[name].append(Sample(1, end - began, extra=figures))
    for each in workers:
        each.stop()
    await asyncio.gather(*running)
    return samples


if __name__ == "__main__":
    sys.exit(main())
