"""The DAG ``orders_by_event``: orders start its runs by arriving, and each is done once."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from typing import TYPE_CHECKING

from airflow_steps import ROOT, provisioned, wait_for

from airflow_provider_jetstream.jetstream import WorkQueue
from testbed.ledger import read_ledger
from testbed.queues import eventually, until_stored

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.airflow import Airflow
    from testbed.face import NatsPyConnection

DAG_ID = "orders_by_event"
QUEUE = ROOT / "example_dags" / "queues" / "orders_by_event.yaml"
FULL = os.environ.get("FAULTS") == "full"
# Orders, and the bursts in which they come.
ORDERS, BURSTS, BURSTS_UNTIL_PAUSE = (500, 50, 5) if FULL else (500, 5, 3)


async def test_five_hundred_orders_in_bursts_are_each_done_once_by_the_runs_that_they_start(
    airflow: Airflow,
    settings: ConnectionSettings,
    connection: NatsPyConnection,
    event_orders: Path,
    record_property: Callable[[str, object], None],
) -> None:
    queue = await provisioned(settings, WorkQueue.load(QUEUE))
    airflow.wait_for_dags(DAG_ID)
    # Airflow starts a watcher when it parses the file of a DAG that isn't paused any more.
    airflow.reparse(DAG_ID)
    client, size = connection.client.jetstream(), ORDERS // BURSTS
    for burst in range(BURSTS):
        for number in range(burst * size, (burst + 1) * size):
            # The publisher is any program.
            await client.publish(f"{queue.name}.new", f"order-{number}".encode())
        published = (burst + 1) * size
        # The next burst comes while a run looks whether orders are left, or is about to end, or after it.
        await eventually(lambda published=published: len(read_ledger(event_orders)) >= published, within=180)  # type: ignore[misc]
        if burst % BURSTS_UNTIL_PAUSE == BURSTS_UNTIL_PAUSE - 1:
            wait_for(lambda: not open_runs(airflow), "the runs to end")
        elif FULL:
            await asyncio.sleep(burst % 9 * 0.5)
    await until_stored(connection, queue.name, 0, within=180)
    wait_for(lambda: not open_runs(airflow), "the runs to end")
    runs = airflow.runs(DAG_ID)
    assert {run["state"] for run in runs} == {"success"}
    done = Counter(entry["order"] for entry in read_ledger(event_orders))
    assert done == {f"order-{number}": 1 for number in range(ORDERS)}
    results = [airflow.xcom(DAG_ID, run["dag_run_id"], "fulfil") for run in runs]
    assert sum(result["counts"].get("completed", 0) for result in results) == ORDERS
    # Counts and ids, and nothing of what the orders say.
    assert "order-" not in json.dumps(results)
    record_property("runs", len(runs))
    print(
        f"{ORDERS} orders in {BURSTS} bursts: {len(runs)} runs, {sum(bool(r['deliveries']) for r in results)} with any"
    )
    # A run after each pause, at least; and no more than there were events.
    assert BURSTS // BURSTS_UNTIL_PAUSE <= len(runs) <= BURSTS * 2


def open_runs(airflow: Airflow) -> list[str]:
    return [run["dag_run_id"] for run in airflow.runs(DAG_ID) if run["state"] not in ("success", "failed")]
