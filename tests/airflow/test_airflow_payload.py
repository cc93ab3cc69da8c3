"""The DAG ``orders_payload``: every order becomes an event, whenever the triggerer is killed.

The short form kills the triggerer twice, ``FAULTS=full`` twenty times. Each fifth time the database is locked, or in
the full form the scheduler is killed as well.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import time
from collections import Counter
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from airflow_steps import ROOT, provisioned, wait_for

from airflow_provider_jetstream.dev.airflow_home import database_path
from airflow_provider_jetstream.jetstream import WorkQueue
from testbed.dead_letters import dead_letter_records
from testbed.face import consumer_info
from testbed.ledger import read_ledger
from testbed.queues import eventually, until_stored

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.airflow import Airflow
    from testbed.face import NatsPyConnection

pytestmark = pytest.mark.since_airflow("3.3", "shared streams that acknowledge")

FULL = os.environ.get("FAULTS") == "full"
QUEUE = WorkQueue.load(ROOT / "example_dags" / "queues" / "orders_payload.yaml")
KILLS = 20 if FULL else 2
ORDERS_PER_KILL = 100 if FULL else 40
HOSTILE = [b"\xff\xfe", b'{"n": NaN}', b"[" * 1_000 + b"]" * 1_000, b"", b'"\\u0000"']


@pytest.fixture
def watched(airflow: Airflow) -> Iterator[None]:
    """Leave a triggerer and a paused DAG to the other tests."""
    airflow.wait_for_dags("orders_payload")
    # Airflow starts a watcher when it parses the file of a DAG that isn't paused any more.
    airflow.reparse("orders_payload")
    yield
    airflow.api("PATCH", "dags/orders_payload", {"is_paused": True})
    if "triggerer" not in airflow.pids():
        airflow.start_triggerer()


def event_payloads(airflow: Airflow) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(f"file:{database_path(airflow.home)}?mode=ro", uri=True)) as database:
        rows = database.execute("SELECT extra FROM asset_event").fetchall()
    payloads = [json.loads(extra).get("payload") for (extra,) in rows]
    return [payload for payload in payloads if isinstance(payload, dict) and payload.get("stream") == QUEUE.name]


def fired(airflow: Airflow, log: str) -> int:
    with suppress(FileNotFoundError):
        return airflow.component_log(log).count("Trigger fired event")
    return 0


def has_fired(airflow: Airflow, log: str, count: int) -> bool:
    return fired(airflow, log) > count


async def publish_orders(connection: NatsPyConnection, numbers: range) -> None:
    for number in numbers:
        await connection.client.jetstream().publish(f"payload.orders.o{number}", json.dumps({"n": number}).encode())


@pytest.mark.usefixtures("watched")
async def test_no_order_is_lost_when_the_triggerer_is_killed(
    airflow: Airflow, settings: ConnectionSettings, connection: NatsPyConnection, record_property: Any
) -> None:
    await provisioned(settings, QUEUE)

    async def is_pulled_from() -> bool:
        return bool((await consumer_info(connection, QUEUE.name, "airflow"))["num_waiting"])

    for body in HOSTILE:
        await connection.client.jetstream().publish("payload.orders.hostile", body)
    for kill in range(KILLS):
        await eventually(is_pulled_from, 120)
        log = "triggerer" if not kill else f"triggerer-killed-{kill}"
        before = fired(airflow, log)
        await publish_orders(connection, range(kill * ORDERS_PER_KILL, (kill + 1) * ORDERS_PER_KILL))
        # The line is written before the event is on its way to the database.
        await asyncio.to_thread(wait_for, partial(has_fired, airflow, log, before + 10), "events", 60)
        airflow.kill_triggerer(log)
        if FULL and kill % 5 == 0:
            airflow.restart_scheduler()
        if kill % 5 == 1:
            await asyncio.to_thread(lock_database, airflow, 3)
        await asyncio.to_thread(
            airflow.start_triggerer, "triggerer" if kill + 1 == KILLS else f"triggerer-killed-{kill + 1}"
        )
    await until_stored(connection, QUEUE.name, 0, within=180)
    events = Counter(payload["body"]["n"] for payload in event_payloads(airflow))
    assert set(events) == set(range(KILLS * ORDERS_PER_KILL))
    duplicates = events.total() - len(events)
    record_property("duplicates", duplicates)
    print(f"{len(events)} orders, {KILLS} kills, {duplicates} events twice")
    records = await dead_letter_records(connection, QUEUE)
    assert sorted(job.data for _, job in records) == sorted(HOSTILE)
    assert all(str(death.explanation).startswith("expected ") for death, _ in records)

    if FULL:
        # A run whose scheduler was killed has failed, with the events that it had.
        return
    # Of events that came in a burst Airflow may hand on the last ones with the next event only.
    ledger, number = Path(airflow.env["PAYLOAD_ORDERS_LEDGER"]), len(events)

    async def all_done() -> bool:
        nonlocal number
        done = {entry["order"]["n"] for entry in read_ledger(ledger)}
        if done >= set(events):
            return True
        await publish_orders(connection, range(number, number + 1))
        number += 1
        await asyncio.sleep(0.5)
        return False

    await eventually(all_done, 120)


def lock_database(airflow: Airflow, seconds: float) -> None:
    """Keep every component from writing, as while a database restarts."""
    with closing(sqlite3.connect(database_path(airflow.home), timeout=30)) as database:
        database.execute("BEGIN EXCLUSIVE")
        time.sleep(seconds)
        database.rollback()
