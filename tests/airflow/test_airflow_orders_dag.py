"""The DAG ``orders``: every order is processed once, dead letters included."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from airflow_steps import ROOT, running_workers, succeeded, wait_for_states

from airflow_provider_jetstream.jetstream import WorkQueue
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from testbed.face import stream_info
from testbed.ledger import read_ledger

if TYPE_CHECKING:
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import Connection, ConnectionSettings
    from testbed.airflow import Airflow

QUEUE = ROOT / "example_dags" / "queues" / "orders.yaml"


@pytest.mark.smoke
async def test_each_of_twenty_orders_is_processed_once(
    airflow: Airflow, settings: ConnectionSettings, connection: Connection, ledger: Path, tmp_path: Path
) -> None:
    airflow.wait_for_dags("orders")
    # Orders that a handler did in another test stay stored.
    stored = await stored_orders(connection)
    run_id = airflow.trigger("orders")
    wait_for_states(airflow, "orders", run_id, {"provision": "success"})
    with running_workers(
        settings,
        "example_workers.orders:process",
        queue=QUEUE,
        logs=tmp_path,
        count=2,
        env={"ORDERS_LEDGER": str(ledger)},
    ):
        succeeded(airflow, "orders", run_id, timeout=180)
    assert airflow.xcom("orders", run_id, "all_done") == {"published": 20, "completed": 20, "handled": 0}
    published = airflow.xcom("orders", run_id, "publish")
    redriven = airflow.xcom("orders", run_id, "redrive")
    assert published["dead"] > 0
    assert redriven["redriven"] == redriven["completed"] == published["dead"]
    assert redriven["failed"] == 0
    assert Counter(entry["order"] for entry in read_ledger(ledger)) == {f"order-{number}": 1 for number in range(20)}
    assert len({entry["process"] for entry in read_ledger(ledger)}) == 2
    assert await stored_orders(connection) == stored


async def stored_orders(connection: Connection) -> int:
    try:
        return int((await stream_info(connection, WorkQueue.load(QUEUE).name))["state"]["messages"])
    except NotFoundError:
        return 0
