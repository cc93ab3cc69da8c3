"""Mapped tasks that publish and wait all succeed at the first try, however fast their jobs end."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from airflow_handlers import LEDGER
from airflow_steps import QUEUES, log_text, provisioned, running_workers

from airflow_provider_jetstream.jetstream import WorkQueue
from testbed.ledger import read_ledger

if TYPE_CHECKING:
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.airflow import Airflow

TASKS = int(os.environ.get("MAPPED_TASKS", "24"))
RUNS = int(os.environ.get("MAPPED_RUNS", "1"))


@pytest.mark.parametrize("run", range(RUNS))
@pytest.mark.parametrize(
    ("variant", "deferring"),
    [pytest.param("inline", False, id="inline"), pytest.param("late", True, id="just-after-deferring")],
)
async def test_mapped_tasks_without_retries_all_succeed(
    airflow: Airflow,
    settings: ConnectionSettings,
    ledger: Path,
    tmp_path: Path,
    variant: str,
    run: int,
    *,
    deferring: bool,
) -> None:
    dag_id = f"mapped_{variant}"
    queue = QUEUES / f"{dag_id}.yaml"
    await provisioned(settings, WorkQueue.load(queue))
    airflow.wait_for_dags(dag_id)
    handler = f"airflow_handlers:{'instant' if variant == 'inline' else 'late'}"
    with running_workers(settings, handler, queue=queue, logs=tmp_path, concurrency=TASKS, env={LEDGER: str(ledger)}):
        run_id = airflow.trigger(dag_id, run_id=f"{variant}-{run}")
        airflow.wait_for_run(dag_id, run_id, timeout=400)
    tasks = [task for task in airflow.task_instances(dag_id, run_id) if task["task_id"] == "publish"]
    assert Counter((task["state"], task["try_number"]) for task in tasks) == {("success", 1): TASKS}
    assert Counter(entry["job"] for entry in read_ledger(ledger)) == {f"job-{number}": 1 for number in range(TASKS)}
    deferred = ["Waiting in the triggerer" in log_text(airflow, dag_id, run_id, "publish", 1, n) for n in range(TASKS)]
    # On a busy machine some jobs end before or after the deferral unlike the others; most of them count.
    assert (sum(deferred) > TASKS / 2) == deferring
