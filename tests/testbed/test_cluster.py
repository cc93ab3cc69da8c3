"""The testbed's cluster is a real one, and leaves nothing behind."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from airflow_provider_jetstream.jetstream import connect, connection_settings
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from testbed.nats_cluster import NatsCluster
from testbed.nats_server import NatsServerError
from testbed.ports import LOOPBACK, free_ports
from testbed.queues import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.face import NatsPyConnection


def stores(cluster: NatsCluster, stream: str) -> list[str]:
    """Return the names of the servers that store a stream."""
    return [name for name in cluster.servers if list(cluster.server(name).store.glob(f"**/streams/{stream}"))]


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


@pytest.mark.slow
async def test_a_cluster_starts_within_20_seconds_and_leaves_nothing_behind() -> None:
    started = time.monotonic()
    with NatsCluster() as cluster:
        print(f"ready after {time.monotonic() - started:.2f} s")
        assert time.monotonic() - started < 20
        assert list(cluster.alive) == list(cluster.servers) == ["n1", "n2", "n3"]
        assert len(set(cluster.urls)) == 3
        assert cluster.meta_leader() in cluster.servers
        pids = [server.pid for server in cluster.servers.values()]
        async with connect(connection_settings({"servers": cluster.urls})) as connection:
            # Once ready, all servers can take replicas.
            await create(connection, "three", num_replicas=3)
            await create(connection, "one", placement={"tags": ["n2"]})
        cluster.wait_settled("three")
        assert stores(cluster, "three") == ["n1", "n2", "n3"]
        assert (stores(cluster, "one"), cluster.leader("one")) == (["n2"], "n2")
        cluster.kill("n3")
        assert list(cluster.alive) == ["n1", "n2"]
    assert [pid for pid in pids if pid is None or psutil.pid_exists(pid)] == []
    assert not cluster.folder.exists()


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


@pytest.mark.slow
async def test_a_cluster_that_was_killed_as_a_whole_comes_back_with_its_data(tmp_path: Path) -> None:
    with NatsCluster(tmp_path) as cluster:
        assert cluster.folder == tmp_path
        urls = cluster.urls
        async with connect(connection_settings({"servers": cluster.urls})) as connection:
            await create(connection, "jobs", num_replicas=3)
            await publish(connection, "jobs", 10)
            cluster.wait_settled("jobs")
        for name in cluster.servers:
            cluster.kill(name)
        assert cluster.alive == {}
        for name in cluster.servers:
            cluster.restart(name)
        cluster.wait_settled("jobs")
        assert cluster.urls == urls
        async with connect(connection_settings({"servers": cluster.urls})) as connection:
            assert await state(connection, "jobs") == (10, 10)


@pytest.mark.slow
def test_a_taken_port_makes_all_servers_choose_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        offers = iter([[*free_ports(2), taken.getsockname()[1]]])
        monkeypatch.setattr("testbed.nats_cluster.free_ports", lambda count: next(offers, None) or free_ports(count))
        with NatsCluster() as cluster:
            assert len(cluster.alive) == 3
            assert "address already in use" in cluster.server("n3").log()
            assert next(offers, None) is None


def test_a_cluster_that_does_not_start_raises_and_is_removed() -> None:
    cluster = NatsCluster(jetstream_config="nonsense {")
    with pytest.raises(NatsServerError, match="Parse error"), cluster:
        pass
    assert cluster.alive == {}
    assert not cluster.folder.exists()
