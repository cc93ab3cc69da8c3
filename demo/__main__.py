"""Run DAGs on a real nats-server, real workers and a real Airflow, and show how every job ended.

First ``orders``, then ``dead_letter_pipeline`` with Spark on this machine.
"""

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from airflow_provider_jetstream.dev import example_load, guide
from airflow_provider_jetstream.dev.example_load import create_queues, publish_without_end
from airflow_provider_jetstream.dev.process import Process, terminate_all
from airflow_provider_jetstream.dev.worker_processes import start_worker
from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.settings import connection_settings
from demo.output import ROOT, DemoError, failure_text, show, task_seconds
from demo.spark import connections, redrive_demo, report_settings
from testbed.airflow import Airflow, AirflowNotReadyError
from testbed.ledger import read_ledger
from testbed.nats_server import NatsServer
from testbed.text_table import text_table

DAG_ID = "orders"
TASKS = ("provision", "publish", "sense", "redrive", "settled", "all_done")
TIMEOUT = 300.0


def main() -> int:
    """Run the demo; the exit status is 0 only if every order was processed once."""
    keep = os.environ.get("KEEP") == "1"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="jetstream-demo-"))
    try:
        with NatsServer(folder / "nats") as nats:
            run_demo(nats, folder, keep=keep, then=partial(redrive_demo, nats, folder))
    except (AirflowNotReadyError, DemoError, TimeoutError) as error:
        show(f"FAILED: {error}\nThe logs are in {folder}")
        return 1
    except KeyboardInterrupt:
        show("stopped")
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def run_demo(
    nats: NatsServer,
    folder: Path,
    *,
    keep: bool = False,
    python: str = sys.executable,
    then: Callable[[Airflow], None] = lambda _: None,
) -> None:
    """Run the DAG once and show the result.

    :param keep: keep everything running afterwards until interrupted
    :param python: the interpreter that has Airflow
    :param then: what else to show on the same Airflow
    """
    airflow = Airflow(
        folder / "airflow", ROOT / "example_dags", connections=connections(nats), env=report_settings(folder)
    )
    ledger = folder / "orders.jsonl"
    workers: list[Process] = []
    show(guide.addresses(airflow.url, nats.url))
    try:
        airflow.start(DAG_ID)
        airflow.unpause(DAG_ID)
        run_id = airflow.trigger(DAG_ID)
        show(f"run {run_id} of the DAG {DAG_ID} started: {airflow.url}/dags/{DAG_ID} shows its tasks,")
        show(f"  {airflow.url}/plugin/jetstream its queue with the dead letters")
        seen: dict[str, str] = {}

        def follow(_: dict[str, Any]) -> None:
            for task in airflow.task_instances(DAG_ID, run_id):
                name, state = task["task_id"], task["state"]
                if state and seen.get(name) != state:
                    seen[name] = state
                    show(f"  {name}: {state}")
            if seen.get("provision") == "success" and not workers:
                workers.extend(start_workers(nats, ledger, folder))
                show("  two workers started; each fails about every second attempt")

        run = airflow.wait_for_run(DAG_ID, run_id, TIMEOUT, follow)
        follow(run)
        if run["state"] != "success":
            raise DemoError(failure_text(airflow, DAG_ID, run_id))
        show(summary(airflow, run_id, ledger))
        then(airflow)
        if keep:
            asyncio.run(keep_running(nats, airflow, folder))
    finally:
        for worker in workers:
            worker.terminate(10)
        airflow.stop()


def start_workers(nats: NatsServer, ledger: Path, folder: Path) -> list[Process]:
    """Start two workers that share the orders; they record in ``ledger`` what they have processed."""
    env = {**os.environ, "NATS_URL": nats.url, "ORDERS_LEDGER": str(ledger), "PYTHONPATH": str(ROOT)}
    return [
        start_worker(
            f"worker-{number}",
            queue=ROOT / "example_dags" / "queues" / "orders.yaml",
            consumer="processor",
            handler="example_workers.orders:process",
            env=env,
            logs=folder / "workers",
        )
        for number in (1, 2)
    ]


def summary(airflow: Airflow, run_id: str, ledger: Path) -> str:
    """Count what happened to the orders, from the tasks' XComs and from the workers' record."""
    published = airflow.xcom(DAG_ID, run_id, "publish")
    redriven = airflow.xcom(DAG_ID, run_id, "redrive")
    runs = Counter(line["order"] for line in read_ledger(ledger))
    lost = published["published"] - len(runs)
    twice = sum(count > 1 for count in runs.values())
    counts = text_table(
        ("orders", "count"),
        [
            ("published", published["published"]),
            ("completed", published["completed"]),
            ("dead", published["dead"]),
            ("redriven", redriven["redriven"]),
            ("completed after redrive", redriven["completed"]),
            ("lost", lost),
            ("run twice", twice),
        ],
    )
    seconds = text_table(
        ("step", "seconds"),
        [
            (task["task_id"], f"{task_seconds(task):.1f}")
            for name in TASKS
            for task in airflow.task_instances(DAG_ID, run_id)
            if task["task_id"] == name
        ],
    )
    if lost or twice or published["completed"] + redriven["completed"] != published["published"]:
        raise DemoError(f"not every order was processed exactly once:\n{counts}")
    return f"\n{counts}\n\n{seconds}\n"


async def keep_running(nats: NatsServer, airflow: Airflow, folder: Path) -> None:
    """Keep everything running, with busy queues as of ``jetstream-queue dev``, until the user interrupts."""
    async with connect(connection_settings({"servers": (nats.url,)})) as connection:
        await create_queues(connection)
        workers = example_load.start_workers(nats.url, folder / "workers")
        try:
            show(guide.next_steps(airflow.url, nats.url, DAG_ID, folder))
            await publish_without_end(connection)
        finally:
            terminate_all(workers, 10)


if __name__ == "__main__":
    sys.exit(main())
