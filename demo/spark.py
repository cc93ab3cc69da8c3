"""Run the DAG ``dead_letter_pipeline`` with Spark on this machine, and show how a store's dead letters ended."""

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from airflow_provider_jetstream.dev.worker_processes import start_worker
from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.settings import connection_settings
from airflow_provider_jetstream.jetstream.dead_letters.find import find_dead_letters
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from demo.output import ROOT, DemoError, failure_text, show, task_seconds
from testbed.airflow import Airflow, AirflowNotReadyError
from testbed.ledger import read_ledger
from testbed.nats_server import NatsServer
from testbed.queues import eventually
from testbed.text_table import text_table

DAG_ID = "dead_letter_pipeline"
QUEUE = ROOT / "example_dags" / "queues" / "store.yaml"
TASKS = ("scan", "report", "redrive")
TIMEOUT = 300.0
# For a hundred dead letters the JVM's start-up time matters more than its peak speed.
CONF = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
}
MALFORMED, BUSY, POISON = 60, 30, 10


def main() -> int:
    """Run the demo; the exit status is 0 only if every dead letter that can be repaired was processed once."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="jetstream-demo-spark-"))
    try:
        with NatsServer(folder / "nats") as nats:
            show(f"nats-server {nats.version} listens on {nats.url}")
            run_demo(nats, folder)
    except (AirflowNotReadyError, DemoError, TimeoutError) as error:
        show(f"FAILED: {error}\nThe logs are in {folder}")
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def run_demo(nats: NatsServer, folder: Path) -> None:
    """Start an Airflow, and redrive a store's dead letters on it."""
    airflow = Airflow(
        folder / "airflow", ROOT / "example_dags", connections=connections(nats), env=report_settings(folder)
    )
    show("starting Airflow: API server, scheduler, DAG processor, triggerer")
    try:
        airflow.start()
        redrive_demo(nats, folder, airflow)
    finally:
        airflow.stop()


def connections(nats: NatsServer) -> dict[str, str]:
    """Return Airflow's connections to NATS and Spark, in JSON form."""
    spark = {"conn_type": "spark", "host": "local[*]", "extra": {"conf": CONF}}
    nats_connection = {"conn_type": "nats", "host": "127.0.0.1", "port": nats.port}
    return {"nats_default": json.dumps(nats_connection), "spark_default": json.dumps(spark)}


def report_settings(folder: Path) -> dict[str, str]:
    """Return the environment variable for the folder of the DAG's reports."""
    return {"DEAD_LETTER_REPORTS": str(folder / "reports")}


def redrive_demo(nats: NatsServer, folder: Path, airflow: Airflow) -> None:
    """Publish orders that become dead letters, run the DAG once and show the result."""
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        show(f"Spark needs Java, which isn't here: {DAG_ID} is left out")
        return
    ledger = folder / "store.jsonl"
    asyncio.run(publish(nats))
    env = {**os.environ, "NATS_URL": nats.url, "STORE_LEDGER": str(ledger), "PYTHONPATH": str(ROOT)}
    worker = start_worker(
        "store", queue=QUEUE, consumer="till", handler="example_workers.store:process", env=env, logs=folder
    )
    try:
        show(f"{MALFORMED + BUSY + POISON} orders of a store that can't be processed, and a worker that tries")
        asyncio.run(wait_for_letters(nats, MALFORMED + BUSY + POISON))
        show(f"all are dead letters; {DAG_ID} reports on them, repairs and redrives them, with Spark")
        airflow.wait_for_dags(DAG_ID)
        run_id = scheduled_run(airflow)
        run = airflow.wait_for_run(DAG_ID, run_id, TIMEOUT)
        if run["state"] != "success":
            raise DemoError(failure_text(airflow, DAG_ID, run_id))
        show(summary(airflow, run_id, ledger))
        show(
            f"The report on the dead letters stays: {keep_report(Path(airflow.xcom(DAG_ID, run_id, 'report')['page']))}"
        )
    finally:
        worker.terminate(10)


def keep_report(page: Path) -> Path:
    """Move the page of a report out of the demo's folder, which is removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="jetstream-report-"))
    return Path(shutil.copy(page, folder / page.name))


async def publish(nats: NatsServer) -> None:
    """Publish orders that fail, each kind for its own reason."""
    malformed = [{"id": number, "amount": f"{number},50", "bank": "quick"} for number in range(MALFORMED)]
    busy = [{"id": MALFORMED + number, "amount": number, "bank": "slow"} for number in range(BUSY)]
    bodies = [*(json.dumps(order).encode() for order in (*malformed, *busy)), *[b"no order"] * POISON]
    async with connect(connection_settings({"servers": (nats.url,)})) as connection:
        await provision(connection, WorkQueue.load(QUEUE))
        for body in bodies:
            await connection.client.jetstream().publish("store.orders.new", body)


async def wait_for_letters(nats: NatsServer, count: int) -> None:
    """Wait until the queue has ``count`` dead letters."""
    async with connect(connection_settings({"servers": (nats.url,)})) as connection:

        async def dead() -> bool:
            return len((await find_dead_letters(connection, WorkQueue.load(QUEUE))).letters) == count

        await eventually(dead, 120)


def scheduled_run(airflow: Airflow) -> str:
    """Return the run that the schedule starts when the DAG is unpaused."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        if runs := airflow.runs(DAG_ID):
            return str(runs[0]["dag_run_id"])
        time.sleep(0.5)
    raise DemoError(f"the schedule of {DAG_ID} started no run within {TIMEOUT:g} s")


def summary(airflow: Airflow, run_id: str, ledger: Path) -> str:
    """Count what happened to the dead letters, from the tasks' XComs and from the worker's record."""
    report, redrive = (airflow.xcom(DAG_ID, run_id, name) for name in ("report", "redrive"))
    done = [line["id"] for line in read_ledger(ledger)]
    counts: list[tuple[str, Any]] = [
        ("dead letters reported on", report["letters"]),
        ("causes", report["causes"]),
        ("redriven", redrive["redriven"]),
        ("completed after redrive", redrive["completed"]),
        ("processed twice", len(done) - len(set(done))),
    ]
    tasks = {task["task_id"]: task for task in airflow.task_instances(DAG_ID, run_id)}
    seconds = [(name, f"{task_seconds(tasks[name]):.1f}") for name in TASKS]
    tables = f"{text_table(('letters', 'count'), counts)}\n\n{text_table(('task', 'seconds'), seconds)}\n"
    if redrive["completed"] != MALFORMED + BUSY or len(done) != len(set(done)):
        raise DemoError(f"not every letter that can be repaired was processed exactly once:\n{tables}")
    return f"\n{tables}"


if __name__ == "__main__":
    sys.exit(main())
