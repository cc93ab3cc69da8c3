"""The provisioning task hands a consumer's jobs over to partitions where its author asks for that."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest

from airflow_provider_jetstream.airflow_compat import AirflowFailException
from airflow_provider_jetstream.jetstream import WorkQueue, provision
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from testbed.face import consumer_info

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection

pytestmark = pytest.mark.usefixtures("own_connections")


async def _run(queue: WorkQueue, **fields: Any) -> Any:
    operator = JetStreamProvisionOperator(task_id="provision", work_queue=queue, **fields)
    return await asyncio.to_thread(operator.execute, cast("Any", {}))


async def test_a_task_migrates_only_where_its_author_asks_for_it(connection: NatsPyConnection, name: str) -> None:
    fields: dict[str, Any] = {"name": name, "subjects": [f"{name}.>"]}
    await provision(connection, WorkQueue(**fields, consumers=[{"name": "worker", "max_deliver": 5}]))
    await connection.client.jetstream().publish(f"{name}.1.email", b"job")
    partitions = {"name": "worker", "filter_subject": f"{name}.{{partition}}.>", "partitions": 2, "max_deliver": 5}
    queue = WorkQueue(**fields, consumers=[partitions])
    with pytest.raises(AirflowFailException, match="provision with migrate=True to hand 1 job over to them"):
        await _run(queue)
    planned = await _run(queue, dry_run=True, migrate=True)
    assert [(step["action"], step["name"]) for step in planned["steps"]] == [
        ("keep", name),
        ("remove", f"{name}/worker"),
        ("create", f"{name}/worker-0"),
        ("create", f"{name}/worker-1"),
        # The filters that the consumers have from then on.
        ("update", name),
    ]
    assert planned["steps"][1]["migration"] == "hands 1 job over to worker-0, worker-1, once none is in flight"
    assert (await connection.api(f"CONSUMER.NAMES.{name}"))["consumers"] == ["worker"]
    await _run(queue, migrate=True)
    assert (await consumer_info(connection, name, "worker-1"))["num_pending"] == 1
