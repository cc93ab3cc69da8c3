"""The sensor of jobs in the mode in which each look is short, against a real server."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import publish_with_handle
from airflow_provider_jetstream.sensors.jobs import JetStreamJobsSensor
from testbed.queues import make_queue, store_completion

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.face import NatsPyConnection


def _no_date(_context: object) -> None:
    """Answer as Airflow does before the first look is over."""


CONTEXT: Any = {
    "ti": SimpleNamespace(get_first_reschedule_date=_no_date, map_index=-1, dag_id="d", run_id="r", task_id="t")
}


@pytest.fixture(autouse=True)
def airflow_connection(settings: ConnectionSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_NATS_DEFAULT", json.dumps({"conn_type": "nats", "host": settings.servers[0]}))


async def test_a_look_of_any_length_reads_what_is_stored(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    published = await publish_with_handle(connection, queue, ["a", "b"], subject=f"{name}.jobs.x")
    sensor = JetStreamJobsSensor(
        task_id="t", handle=published, mode="reschedule", defer_after=0, deferrable=False, max_dead=None
    )
    assert not await asyncio.to_thread(sensor.poke, CONTEXT)
    await store_completion(connection, queue, 1)
    assert not await asyncio.to_thread(sensor.poke, CONTEXT)
    await store_completion(connection, queue, 2)
    found = await asyncio.to_thread(sensor.poke, CONTEXT)
    assert found
    assert (found.xcom_value or {})["completed"] == 2
