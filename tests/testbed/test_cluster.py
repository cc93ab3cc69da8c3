"""The testbed's cluster is a real one, and leaves nothing behind."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import connect, connection_settings
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from testbed.nats_cluster import NatsCluster
from testbed.nats_server import NatsServerError
from testbed.queues import eventually

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection


async def create(connection: NatsPyConnection, name: str, **fields: Any) -> None:
    await connection.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.>"]} | fields)


async def publish(connection: NatsPyConnection, name: str, count: int) -> None:
    jetstream = connection.client.jetstream(timeout=5)
    for number in range(count):
        await jetstream.publish(f"{name}.{number}", b"")


async def state(connection: NatsPyConnection, name: str) -> tuple[int, int]:
    async def answer() -> dict[str, Any]:
        # The connection's server may be the one that was killed.
        with suppress(JetStreamProviderError):
            return await connection.api(f"STREAM.INFO.{name}")
        return {}

    stream_state = (await eventually(answer, within=30))["state"]
    return stream_state["messages"], stream_state["last_seq"]


@pytest.mark.smoke
@pytest.mark.slow
async def test_a_replicated_stream_survives_the_kill_of_its_leader() -> None:
    with NatsCluster() as cluster:
        async with connect(connection_settings({"servers": cluster.urls, "timeout": 2})) as connection:
            await create(connection, "jobs", num_replicas=3)
            config = {"name": "w", "durable_name": "w", "ack_policy": "explicit"}
            await connection.api("CONSUMER.CREATE.jobs.w", {"stream_name": "jobs", "config": config})
            await publish(connection, "jobs", 10)
            cluster.wait_settled("jobs")
            killed = cluster.leader("jobs")
            cluster.kill(killed)
            assert not cluster.server(killed).alive
            with pytest.raises(NatsServerError, match="until all replicas of jobs are current"):
                cluster.wait_settled("jobs", within=0.5)
            assert cluster.leader("jobs") != killed
            assert cluster.consumer_leader("jobs", "w") != killed
            assert await state(connection, "jobs") == (10, 10)
            await publish(connection, "jobs", 5)
            cluster.restart(killed)
            cluster.wait_settled("jobs")
            # The restarted server has caught up: with another one killed it is needed for a majority.
            cluster.kill(cluster.leader("jobs"))
            assert cluster.leader("jobs") in cluster.alive
            assert await state(connection, "jobs") == (15, 15)
