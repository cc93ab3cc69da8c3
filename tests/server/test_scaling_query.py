"""The query of docs/kubernetes.md by which workers are scaled, in a real Prometheus: it counts live work only."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import yaml

from airflow_provider_jetstream.jetstream import connect, connection_settings
from testbed.code_blocks import code_blocks
from testbed.dead_letters import make_terminated_letters
from testbed.face import consumer_info
from testbed.prometheus import exporter, prometheus
from testbed.queues import CONSUMER, eventually, make_dead_letters, make_queue, publish_jobs, pull_jobs, stored_count

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer


def query_for(name: str) -> str:
    """The page's query, about another queue and consumer."""
    (scaled,) = [
        found
        for block in code_blocks("yaml")
        if block.page == "docs/kubernetes.md" and (found := yaml.safe_load(block.code))["kind"] == "ScaledObject"
    ]
    query = str(scaled["spec"]["triggers"][0]["metadata"]["query"])
    return query.replace('"orders_stream"', f'"{name}"').replace('"processor"', f'"{CONSUMER}"')


def load_of_keda(server: NatsServer, stream: str, consumer: str) -> int:
    """What KEDA's scaler ``nats-jetstream`` computes of the monitoring port."""
    (account,) = server.monitor("jsz?acc=$G&consumers=true&config=true")["account_details"]
    (detail,) = [each for each in account["stream_detail"] if each["name"] == stream]
    for each in detail.get("consumer_detail") or []:
        if each["name"] == consumer:
            return int(each["num_pending"] + each["num_ack_pending"])
    return int(detail["state"]["last_seq"])


@pytest.mark.slow
async def test_live_work_counts_and_dead_letters_do_not(own_nats: NatsServer, name: str, tmp_path: Path) -> None:
    query = query_for(name)
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 5})) as admin:
        queue = await make_queue(admin, name, consumer={"ack_wait": "60s"})
        await make_dead_letters(admin, queue, ["a", "b"])
        await make_terminated_letters(admin, queue, ["c"])
        with exporter(own_nats.url) as port, prometheus(port, tmp_path / "prometheus") as server:
            await eventually(lambda: server.values(query) == [0], within=60)
            assert await stored_count(admin, name) == 2
            assert load_of_keda(own_nats, name, CONSUMER) == 0
            # A wrong name counts everything that was ever stored there; the query has no value, which is an error.
            assert load_of_keda(own_nats, name, "unknown") == 3
            assert server.values(query_for("unknown")) == []
            await publish_jobs(admin, queue, ["d", "e", "f"])
            await pull_jobs(admin, queue, 1)
            await eventually(lambda: server.values(query) == [3], within=30)
            assert load_of_keda(own_nats, name, CONSUMER) == 3
            await admin.api(f"CONSUMER.PAUSE.{name}.{CONSUMER}", {"pause_until": "2099-01-01T00:00:00Z"})
            await eventually(lambda: server.values(query) == [0], within=30)
            assert load_of_keda(own_nats, name, CONSUMER) == 3


@pytest.mark.slow
async def test_a_death_that_nobody_pulls_for_counts_until_the_first_pull(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "100ms", "max_deliver": 2})
    await publish_jobs(connection, queue, ["a"])
    await pull_jobs(connection, queue, 1)
    await pull_jobs(connection, queue, 1)
    await asyncio.sleep(0.4)

    async def load() -> int:
        info = await consumer_info(connection, name, CONSUMER)
        return int(info["num_pending"] + info["num_ack_pending"])

    assert (await load(), await stored_count(connection, f"{name}-dead")) == (1, 0)
    # What a worker that is started for it does.
    await connection.client.publish(
        f"$JS.API.CONSUMER.MSG.NEXT.{name}.{CONSUMER}", b'{"batch":1,"expires":200000000}', reply="_INBOX.worker"
    )

    async def settled() -> bool:
        return await load() == 0

    await eventually(settled)
    assert (await stored_count(connection, name), await stored_count(connection, f"{name}-dead")) == (1, 1)
