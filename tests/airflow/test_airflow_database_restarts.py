"""The DAG ``orders_payload`` on PostgreSQL: no order is lost when database, scheduler and triggerer are killed.

``make test-database-restarts`` runs it; the test command has the short form, a locked sqlite, in
``test_airflow_payload.py``.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from airflow_steps import ROOT, provisioned
from postgresql import PostgreSQL

from airflow_provider_jetstream.jetstream import WorkQueue
from testbed.airflow import Airflow, AirflowApiError, AirflowNotReadyError
from testbed.ledger import read_ledger
from testbed.queues import eventually, stored_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.face import NatsPyConnection

pytestmark = pytest.mark.nightly

DAGS = ("orders_payload", "orders_by_event")
QUEUES = [WorkQueue.load(ROOT / "example_dags" / "queues" / f"{dag}.yaml") for dag in DAGS]
ROUNDS = 6
ORDERS_A_ROUND = 200
SECONDS_A_ROUND = 10
SECONDS_AWAY = 5


@pytest.fixture
def database() -> Iterator[PostgreSQL]:
    with PostgreSQL() as server:
        yield server


@pytest.fixture
def on_postgresql(database: PostgreSQL, connections: dict[str, dict[str, object]], tmp_path: Path) -> Iterator[Airflow]:
    (tmp_path / "dags").mkdir()
    for dag in DAGS:
        shutil.copy(ROOT / "example_dags" / f"{dag}.py", tmp_path / "dags")
    shutil.copytree(ROOT / "example_dags" / "queues", tmp_path / "dags" / "queues")
    instance = Airflow(
        tmp_path / "home",
        tmp_path / "dags",
        connections={"nats_default": json.dumps(connections["nats_default"])},
        env={
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": database.url,
            "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "1",
            "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "4",
            # A task that died with its scheduler holds its run, and the next one waits for that.
            "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "20",
            "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5",
            "EVENT_ORDERS_LEDGER": str(tmp_path / "event_orders.jsonl"),
        },
    )
    with instance:
        yield instance


async def publish(connection: NatsPyConnection, numbers: range) -> None:
    """Publish orders to both DAGs, spread over a round."""
    client = connection.client.jetstream()
    for number in numbers:
        await client.publish(f"payload.orders.o{number}", json.dumps({"n": number}).encode())
        await client.publish(f"{QUEUES[1].name}.new", f"order-{number}".encode())
        await asyncio.sleep(SECONDS_A_ROUND / ORDERS_A_ROUND)


async def kill(airflow: Airflow, database: PostgreSQL, turn: int) -> None:
    """Kill the database for some seconds; each second time the triggerer or the scheduler as well."""
    await asyncio.sleep(SECONDS_A_ROUND / 3)
    await asyncio.to_thread(database.kill)
    if turn % 2:
        airflow.kill_triggerer()
    await asyncio.sleep(SECONDS_AWAY)
    await asyncio.to_thread(database.start)
    await eventually(lambda: answers(airflow))
    if turn % 2:
        # It is started; while it is awaited, another component may notice that its database was away, and end.
        with suppress(AirflowNotReadyError):
            await asyncio.to_thread(airflow.start_triggerer)
    else:
        airflow.restart_scheduler()


def answers(airflow: Airflow) -> bool:
    with suppress(AirflowApiError, httpx.TransportError):
        airflow.restart_ended()
        return bool(airflow.api("GET", "jobs?limit=1"))
    return False


async def test_no_order_is_lost_when_database_scheduler_and_triggerer_are_killed(
    on_postgresql: Airflow,
    database: PostgreSQL,
    settings: ConnectionSettings,
    connection: NatsPyConnection,
    tmp_path: Path,
) -> None:
    for queue in QUEUES:
        await provisioned(settings, queue)
    on_postgresql.wait_for_dags(*DAGS)
    for dag in DAGS:
        on_postgresql.reparse(dag)
    restarted: Counter[str] = Counter()
    for turn in range(ROUNDS):
        numbers = range(turn * ORDERS_A_ROUND, (turn + 1) * ORDERS_A_ROUND)
        await asyncio.gather(publish(connection, numbers), kill(on_postgresql, database, turn))
        restarted.update(on_postgresql.restart_ended())

    async def are_settled() -> bool:
        restarted.update(on_postgresql.restart_ended())
        await asyncio.sleep(1)
        return not any([await stored_count(connection, queue.name) for queue in QUEUES])

    await eventually(are_settled, 400)
    expected = set(range(ROUNDS * ORDERS_A_ROUND))
    payloads = [json.loads(extra).get("payload") for extra in database.rows("select extra from asset_event")]
    taken = [each for each in payloads if isinstance(each, dict) and each.get("stream") == QUEUES[0].name]
    events = Counter(payload["body"]["n"] for payload in taken)
    done = Counter(entry["order"] for entry in read_ledger(Path(on_postgresql.env["EVENT_ORDERS_LEDGER"])))
    print(f"payload: {len(events)} orders, {events.total() - len(events)} events twice")
    print(f"doorbell: {len(done)} orders, {done.total() - len(done)} done twice; restarted {dict(restarted)}")
    assert set(events) == expected
    assert set(done) == {f"order-{number}" for number in expected}
