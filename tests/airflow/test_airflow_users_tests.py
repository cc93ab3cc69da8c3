"""A test of a DAG as its author writes it: ``dag.test()`` with the fixture ``queue``, whatever backend holds XComs."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from testbed.airflow_settings import airflow_env, migrate, prepare_home
from testbed.ports import free_port

if TYPE_CHECKING:
    from pathlib import Path

DAG = """
from airflow.sdk import DAG

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.operators.consume import jetstream_consume_task
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.sensors.jobs import JetStreamJobsSensor

ORDERS = {
    "name": "orders",
    "subjects": ["orders.>"],
    "consumers": [{"name": "packer", "max_deliver": 1, "ack_wait": "10s"}],
    "dead_letters": "orders-dead",
    "events": "orders-events",
}

with DAG("packing", schedule=None) as dag:
    publish = JetStreamPublishOperator(task_id="publish", work_queue=ORDERS, jobs=["one", "two"], subject="orders.new")

    @jetstream_consume_task(work_queue=ORDERS, consumer="packer")
    def pack(order):
        if order.body == b"two":
            raise ValueError("out of boxes")
        return {"packed": order.body.decode()}

    wait = JetStreamJobsSensor(task_id="wait", handle=publish.output, max_dead=1, returns="jobs", deferrable=False)

    @dag.task
    def results(reports):
        found = JetStreamHook().job_reports(reports)
        return [report["result"] for report in found if report["state"] == "completed"]

    publish >> pack() >> wait
    results(wait.output)
"""
TEST = """
from packing import ORDERS, dag

from airflow_provider_jetstream.testing import queue


def test_an_order_that_cannot_be_packed_is_a_dead_letter(queue):
    orders = queue(ORDERS)
    run = dag.test()
    assert run.state == "success"
    assert [letter.death.error_message for letter in orders.dead_letters()] == ["out of boxes"]
"""
BACKEND = "airflow.providers.common.io.xcom.backend.XComObjectStorageBackend"


@pytest.mark.parametrize("backend", ["database", "object storage"])
def test_a_dag_with_workers_and_waits_runs_in_a_test_of_its_author(
    backend: str, tmp_path: Path, migrated_databases: Path
) -> None:
    home, dags, stored = tmp_path / "home", tmp_path / "dags", tmp_path / "xcoms"
    for folder in (dags, stored):
        folder.mkdir()
    (dags / "packing.py").write_text(DAG)
    # Every value goes to the storage, small ones too.
    storage = {
        "AIRFLOW__CORE__XCOM_BACKEND": BACKEND,
        "AIRFLOW__COMMON_IO__XCOM_OBJECTSTORAGE_PATH": stored.as_uri(),
        "AIRFLOW__COMMON_IO__XCOM_OBJECTSTORAGE_THRESHOLD": "0",
    }
    env = airflow_env(
        home=home,
        dags_folder=dags,
        port=free_port(),
        connections={},
        extra=storage if backend == "object storage" else {},
        parallelism=1,
    )
    prepare_home(home)
    migrate(home, env, sys.executable, migrated_databases)
    (tmp_path / "test_packing.py").write_text(TEST)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "test_packing.py"],
        env=env | {"PYTHONPATH": str(dags)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[{'packed': 'one'}]" in done.stdout
    kept = [file for file in stored.rglob("*") if file.is_file() and "publish" in str(file)]
    assert bool(kept) is (backend == "object storage")
