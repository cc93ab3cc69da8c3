"""Spark applications of a real Airflow's tasks: the whole pipeline, and the application's end with its task."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from airflow_steps import ROOT, log_text, provisioned, running_workers, succeeded, wait_for

from airflow_provider_jetstream.jetstream import WorkQueue, find_dead_letters
from testbed.ledger import read_ledger
from testbed.queues import eventually

if TYPE_CHECKING:
    from airflow_steps import Secrets

    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.airflow import Airflow
    from testbed.face import NatsPyConnection

DAG_ID = "dead_letter_pipeline"
QUEUE = ROOT / "example_dags" / "queues" / "store.yaml"
HANDLER = "example_workers.store:process"
# A JVM takes seconds to start, and ten times as long while others start.
TIMEOUT = 400.0


def order(number: int, amount: Any, bank: str = "quick") -> bytes:
    return json.dumps({"id": number, "amount": amount, "bank": bank}).encode()


REPAIRED = [order(number, f"{number},50") for number in (101, 102, 103)]
BUSY = [order(number, number, "slow") for number in (104, 105)]
POISON = [b"nothing"]


def text_of(folder: Path, pattern: str) -> str:
    return "".join(file.read_text(errors="replace") for file in folder.rglob(pattern) if file.is_file())


def applications(name: str) -> list[psutil.Process]:
    """Return the JVMs of applications by the beginning of their name."""
    jvms = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = process.info["cmdline"] or []
        if f"spark.app.name={name}" in " ".join(command) and process.info["status"] != psutil.STATUS_ZOMBIE:
            jvms.append(process)
    return jvms


@pytest.fixture(scope="module", autouse=True)
def elsewhere(airflow: Airflow) -> str:
    """The run of a task whose master is unreachable, which takes most of its time waiting."""
    airflow.wait_for_dags("spark_elsewhere")
    return airflow.trigger("spark_elsewhere")


async def test_letters_are_scanned_reported_repaired_redriven_and_awaited(
    airflow: Airflow,
    settings: ConnectionSettings,
    connection: NatsPyConnection,
    secrets: Secrets,
    spark_events: Path,
    ledger: Path,
    tmp_path: Path,
) -> None:
    queue = await provisioned(settings, WorkQueue.load(QUEUE))
    before = len((await find_dead_letters(connection, queue)).letters)
    for body in (*REPAIRED, *BUSY, *POISON):
        await connection.client.jetstream().publish("store.orders.new", body)
    with running_workers(
        settings, HANDLER, queue=QUEUE, logs=tmp_path, concurrency=4, env={"STORE_LEDGER": str(ledger)}
    ):

        async def all_dead() -> bool:
            return len((await find_dead_letters(connection, queue)).letters) == before + 6

        await eventually(all_dead, 60)
        # Its schedule starts a run when it is unpaused.
        airflow.wait_for_dags(DAG_ID)
        (run,) = await asyncio.to_thread(wait_for, lambda: airflow.runs(DAG_ID), "a run of the schedule")
        run_id = run["dag_run_id"]
        await asyncio.to_thread(succeeded, airflow, DAG_ID, run_id, TIMEOUT)
    assert {entry["id"]: entry["amount"] for entry in read_ledger(ledger)} == {
        101: 101.5,
        102: 102.5,
        103: 103.5,
        104: 104,
        105: 105,
    }
    assert len((await find_dead_letters(connection, queue)).letters) == before + len(POISON)
    report = airflow.xcom(DAG_ID, run_id, "report")
    assert report["letters"] == before + 6
    page = text_of(Path(report["page"]).parent, "*.html")
    # Names may be broken over lines between their words.
    assert "MalformedOrderError" in page.replace("<wbr>", "")
    result = airflow.xcom(DAG_ID, run_id, "redrive")
    assert (result["redriven"], result["completed"], result["dead"]) == (5, 5, 0)
    log = log_text(airflow, DAG_ID, run_id, "redrive")
    assert "runs as local-" in log
    assert "5 dead letters redriven" in log
    events = text_of(spark_events, "*")
    assert f"{DAG_ID}.redrive {run_id}" in events
    assert [secret.split("-")[0] for secret in secrets.all() if secret in events + log + page] == []
    assert applications(f"{DAG_ID}.") == []


async def test_the_application_of_a_task_that_is_marked_as_failed_ends(airflow: Airflow) -> None:
    airflow.wait_for_dags("spark_killed")
    run_id = airflow.trigger("spark_killed")
    name = f"spark_killed.spark_killed {run_id}"

    def is_running() -> bool:
        return "runs as local-" in log_text(airflow, "spark_killed", run_id, "spark_killed")

    await asyncio.to_thread(wait_for, lambda: applications(name), "the application's JVM", TIMEOUT)
    await asyncio.to_thread(wait_for, is_running, "the application to run", TIMEOUT)
    path = f"dags/spark_killed/dagRuns/{run_id}/taskInstances/spark_killed"
    airflow.api("PATCH", path, {"new_state": "failed"})
    await asyncio.to_thread(wait_for, lambda: not applications(name), "the application to be gone", 60)

    def has_stopped() -> bool:
        return "the Spark application was stopped, as the task was" in log_text(
            airflow, "spark_killed", run_id, "spark_killed"
        )

    await asyncio.to_thread(wait_for, has_stopped, "the task to log it", 30)
