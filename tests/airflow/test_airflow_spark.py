"""Spark applications of a real Airflow's tasks: the pipeline from end to end, and how they end when the task does."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from airflow_steps import ROOT, ledger_of, log_text, provisioned, running_workers, succeeded, wait_for, wait_for_states

from airflow_provider_jetstream.jetstream.dead_letters.find import find_dead_letters
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from testbed.queues import eventually

if TYPE_CHECKING:
    from conftest import Secrets

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
    from testbed.airflow import Airflow

DAG_ID = "dead_letter_pipeline"
QUEUE = ROOT / "example_dags" / "queues" / "store.yaml"
HANDLER = "example_workers.store:process"
# A JVM takes seconds to start, and ten times as long where others do so at the same time.
PATIENCE = 400.0


def order(number: int, amount: Any, bank: str = "quick") -> bytes:
    return json.dumps({"id": number, "amount": amount, "bank": bank}).encode()


MENDED = [order(number, f"{number},50") for number in (101, 102, 103)]
BUSY = [order(number, number, "slow") for number in (104, 105)]
POISON = [b"nothing"]


def text_of(folder: Path, pattern: str) -> str:
    return "".join(file.read_text(errors="replace") for file in folder.rglob(pattern) if file.is_file())


def applications(named: str) -> list[psutil.Process]:
    """Find the JVMs of applications by a part of their name."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = process.info["cmdline"] or []
        if f"spark.app.name={named}" in " ".join(command) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


async def test_letters_are_scanned_reported_on_mended_redriven_and_waited_for(
    airflow: Airflow,
    settings: ConnectionSettings,
    connection: Connection,
    secrets: Secrets,
    spark_events: Path,
    ledger: Path,
    tmp_path: Path,
) -> None:
    queue = await provisioned(settings, WorkQueue.load(QUEUE))
    before = len((await find_dead_letters(connection, queue)).letters)
    for body in (*MENDED, *BUSY, *POISON):
        await connection.client.jetstream().publish("store.orders.new", body)
    with running_workers(
        settings, HANDLER, queue=QUEUE, logs=tmp_path, concurrency=4, env={"STORE_LEDGER": str(ledger)}
    ):

        async def dead() -> bool:
            return len((await find_dead_letters(connection, queue)).letters) == before + 6

        await eventually(dead, 60)
        # Its schedule begins a run when it is unpaused.
        airflow.wait_for_dags(DAG_ID)
        (run,) = await asyncio.to_thread(wait_for, lambda: airflow.runs(DAG_ID), "a run of the schedule")
        run_id = run["dag_run_id"]
        await asyncio.to_thread(succeeded, airflow, DAG_ID, run_id, PATIENCE)
    assert {entry["id"]: entry["amount"] for entry in ledger_of(ledger)} == {
        101: 101.5,
        102: 102.5,
        103: 103.5,
        104: 104,
        105: 105,
    }
    assert len((await find_dead_letters(connection, queue)).letters) == before + len(POISON)
    told = airflow.xcom(DAG_ID, run_id, "report")
    assert told["letters"] == before + 6
    page = text_of(Path(told["page"]).parent, "*.html")
    assert "MalformedOrderError" in page
    done = airflow.xcom(DAG_ID, run_id, "redrive")
    assert (done["redriven"], done["completed"], done["dead"]) == (5, 5, 0)
    log = log_text(airflow, DAG_ID, run_id, "redrive")
    assert "runs as local-" in log
    assert "5 dead letters redriven" in log
    events = text_of(spark_events, "*")
    assert f"{DAG_ID}.redrive {run_id}" in events
    assert [secret.split("-")[0] for secret in secrets.all() if secret in events + log + page] == []
    assert applications(f"{DAG_ID}.") == []


async def test_a_task_that_is_marked_as_failed_takes_its_application_with_it(airflow: Airflow) -> None:
    airflow.wait_for_dags("spark_killed")
    run_id = airflow.trigger("spark_killed")
    name = f"spark_killed.spark_killed {run_id}"

    def asking() -> bool:
        return "runs as local-" in log_text(airflow, "spark_killed", run_id, "spark_killed")

    await asyncio.to_thread(wait_for, lambda: applications(name), "the application's JVM", PATIENCE)
    await asyncio.to_thread(wait_for, asking, "the application to work", PATIENCE)
    path = f"dags/spark_killed/dagRuns/{run_id}/taskInstances/spark_killed"
    airflow.api("PATCH", path, {"new_state": "failed"})
    await asyncio.to_thread(wait_for, lambda: not applications(name), "the application to be gone", 60)

    def told() -> bool:
        return "the Spark application was stopped, as the task was" in log_text(
            airflow, "spark_killed", run_id, "spark_killed"
        )

    await asyncio.to_thread(wait_for, told, "the task to tell so", 30)


async def test_a_master_that_isnt_there_fails_the_task_in_time(airflow: Airflow) -> None:
    airflow.wait_for_dags("spark_elsewhere")
    run_id = airflow.trigger("spark_elsewhere")
    await asyncio.to_thread(
        wait_for_states, airflow, "spark_elsewhere", run_id, {"spark_elsewhere": "failed"}, timeout=90
    )
    log = log_text(airflow, "spark_elsewhere", run_id, "spark_elsewhere")
    assert "JS521 expected a Spark master at spark://127.0.0.1:" in log
    assert "start it, or correct host and port of the Spark connection" in log
