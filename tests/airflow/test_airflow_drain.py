"""The provisioning task waits for a consumer's jobs before it has partitions, where its author asks for that."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest

from airflow_provider_jetstream.airflow_compat import AirflowFailException
from airflow_provider_jetstream.jetstream import WorkQueue, provision
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from testbed.foreign_programs import acknowledge, pull

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection

pytestmark = pytest.mark.usefixtures("own_connections")


async def _run(queue: WorkQueue, **fields: Any) -> Any:
    operator = JetStreamProvisionOperator(task_id="provision", work_queue=queue, **fields)
    return await asyncio.to_thread(operator.execute, cast("Any", {}))


async def test_a_task_drains_only_where_its_author_asks_for_it(connection: NatsPyConnection, name: str) -> None:
    fields: dict[str, Any] = {"name": name, "subjects": [f"{name}.>"]}
    await provision(connection, WorkQueue(**fields, consumers=[{"name": "worker", "max_deliver": 5}]))
    await connection.client.jetstream().publish(f"{name}.1.email", b"job")
    partitions = {"name": "worker", "filter_subject": f"{name}.{{partition}}.>", "partitions": 2, "max_deliver": 5}
    queue = WorkQueue(**fields, consumers=[partitions])
    with pytest.raises(AirflowFailException, match="provision with drain=True"):
        await _run(queue)
    planned = await _run(queue, dry_run=True, drain=True)
    assert [(step["action"], step["name"]) for step in planned["steps"]] == [
        ("keep", name),
        ("remove", f"{name}/worker"),
        ("create", f"{name}/worker-0"),
        ("create", f"{name}/worker-1"),
        # The filters that the consumers have from then on.
        ("update", name),
    ]
    assert planned["steps"][1]["drain"] == (
        "waits for 1 job of it and parks what is dead, then gives its subjects to worker-0, worker-1"
    )
    assert (await connection.api(f"CONSUMER.NAMES.{name}"))["consumers"] == ["worker"]
    draining = asyncio.create_task(_run(queue, drain=True))
    async for message in pull(connection.client, name, "worker", batch=1, expires=5):
        await acknowledge(connection.client, message)
    await draining
    assert (await connection.api(f"CONSUMER.NAMES.{name}"))["consumers"] == ["worker-0", "worker-1"]
