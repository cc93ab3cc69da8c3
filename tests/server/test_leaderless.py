"""A cluster without a leader is neither a server without JetStream nor one that refuses."""

from __future__ import annotations

import asyncio

import pytest

from airflow_provider_jetstream.jetstream import connect, connection_settings
from airflow_provider_jetstream.jetstream.errors import ApiError, TransientError, UnreachableError
from testbed.nats_cluster import NatsCluster
from testbed.queues import eventually


async def _open(cluster: NatsCluster, within: float) -> None:
    async with connect(connection_settings({"servers": cluster.urls, "timeout": within})):
        pass


@pytest.mark.slow
async def test_connecting_waits_for_a_cluster_that_elects_its_leader() -> None:
    with NatsCluster() as cluster:
        cluster.kill(cluster.meta_leader())
        with pytest.raises(UnreachableError, match=r"^JetStream is unavailable just now: no answer; try again, "):
            await _open(cluster, 0.8)
        await _open(cluster, 30)
        # The remaining server needs some seconds to notice that it is alone. A leader would answer until then.
        killed = cluster.meta_leader()
        cluster.kill(killed)
        with pytest.raises(
            UnreachableError, match=r"just now: JetStream system temporarily .* \(status 503, error 10008"
        ):
            await _open(cluster, 20)
        cluster.restart(killed)
        await _open(cluster, 30)


@pytest.mark.slow
async def test_the_error_of_a_cluster_without_a_majority_says_that_it_is_temporary() -> None:
    with NatsCluster() as cluster:
        async with connect(connection_settings({"servers": cluster.urls, "timeout": 2})) as opened:
            await opened.api("STREAM.CREATE.kept", {"name": "kept", "subjects": ["kept"], "num_replicas": 3})
            _, *others = cluster.servers
            for other in others:
                cluster.kill(other)

            async def problem() -> str:
                # Until the remaining server notices that it is alone, it refuses in other ways, or not at all.
                try:
                    await opened.api("STREAM.MSG.GET.kept", {"seq": 1})
                except (ApiError, TransientError) as error:
                    return str(error) if isinstance(error, UnreachableError) and "10008" in str(error) else ""
                return ""

            assert await eventually(problem, within=40) == (
                "JetStream is unavailable just now: JetStream system temporarily unavailable (status 503, error 10008)"
                " in answer to STREAM.MSG.GET.kept; try again, since a cluster that elects a leader is back in seconds;"
                " if it stays so, make sure that most of the cluster's servers run and reach each other"
            )
            await asyncio.to_thread(cluster.restart, others[0])
            await asyncio.to_thread(cluster.leader, "kept")
            assert (await opened.api("STREAM.INFO.kept"))["config"]["name"] == "kept"
