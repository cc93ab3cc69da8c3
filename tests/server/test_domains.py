"""A hub and a leaf node with a queue of the same name: the advisories of one aren't about the queue of the other."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import (
    WaitPolicy,
    connect,
    connection_settings,
    find_dead_letters,
    redrive_dead_letters,
    take_cursor,
    wait,
)
from airflow_provider_jetstream.jetstream import publish as publish_through_core
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from airflow_provider_jetstream.worker import (
    Delivery,
    Worker,
)
from airflow_provider_jetstream.worker.errors import GiveUpError
from testbed.face import stream_info
from testbed.nats_server import NatsServer
from testbed.ports import LOOPBACK, free_port
from testbed.queues import CONSUMER, eventually, make_queue, pull_jobs, stored_count
from testbed.spark_face import run_on_own_connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from typing import Any

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.spark_face import BlockingConnection

QUEUE = "shop"
# Of the same name, a consumer here would get the acknowledgements of the one there.
OTHER = "other"


def domain_config(domain: str) -> str:
    return f"domain: {domain}" if domain else ""


@pytest.fixture(params=[("hub", "leaf"), ("", "leaf")], ids=["hub has a domain", "hub has none"])
def servers(request: pytest.FixtureRequest) -> Iterator[tuple[NatsServer, NatsServer]]:
    hub_domain, leaf_domain = request.param
    port = free_port()
    hub_config = f'server_name: hub\nleafnodes {{ listen: "{LOOPBACK}:{port}" }}'
    leaf_config = f'server_name: leaf\nleafnodes {{ remotes: [{{ url: "nats://{LOOPBACK}:{port}" }}] }}'
    with ExitStack() as stack:
        hub = stack.enter_context(NatsServer(config=hub_config, jetstream_config=domain_config(hub_domain)))
        leaf = stack.enter_context(NatsServer(config=leaf_config, jetstream_config=domain_config(leaf_domain)))
        yield hub, leaf


@pytest.fixture
async def connections(servers: tuple[NatsServer, NatsServer]) -> AsyncIterator[tuple[NatsPyConnection, ...]]:
    hub, leaf = servers

    def is_joined() -> bool:
        return bool(hub.monitor("leafz")["leafnodes"])

    await eventually(is_joined)
    settings = [connection_settings({"servers": (server.url,), "timeout": 5}) for server in (hub, leaf)]
    async with connect(settings[0]) as on_hub, connect(settings[1]) as on_leaf:
        yield on_hub, on_leaf


async def make_same_queue(connection: NatsPyConnection, subject: str, **consumer: Any) -> WorkQueue:
    """Make a queue of the same name, with the subjects of its own domain."""
    return await make_queue(connection, QUEUE, subjects=[f"{subject}.>"], consumer={"ack_wait": "30s"} | consumer)


async def publish(connection: NatsPyConnection, subject: str, count: int) -> list[int]:
    jetstream = connection.client.jetstream()
    return [(await jetstream.publish(f"{subject}.{number}", b"job")).seq for number in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["hub", "leaf"])
async def test_advisories_of_another_domain_are_not_about_the_queue(
    connections: tuple[NatsPyConnection, NatsPyConnection], reader: str
) -> None:
    here, there = connections if reader == "hub" else connections[::-1]
    assert here.domain != there.domain
    ours, theirs = await make_same_queue(here, "ours"), await make_same_queue(there, "theirs", name=OTHER)
    assert await publish(here, "ours", 5) == await publish(there, "theirs", 5) == [1, 2, 3, 4, 5]
    # Here all jobs are done, there the jobs of the same sequences are terminated.
    for message in await pull_jobs(there, theirs, 5, consumer=OTHER):
        await message.term()

    async def all_captured() -> bool:
        return await stored_count(here, f"{QUEUE}-dead") >= 5

    await eventually(all_captured)
    for message in await pull_jobs(here, ours, 5):
        await message.ack_sync()
    findings = await find_dead_letters(here, ours)
    assert (findings.letters, findings.dismissed, findings.uncertain) == ((), (), 0)
    (risk,) = (risk for risk in findings.risks if risk.name == "other-domain")
    assert risk.startswith(f"5 entries of {QUEUE}-dead were published in another JetStream domain")
    report = await redrive_dead_letters(here, ours)
    assert (len(report.redriven), report.failures) == (0, 0)
    assert (await stream_info(here, QUEUE))["state"]["last_seq"] == 5
    found = await find_dead_letters(there, theirs)
    assert len(found.letters) + len(found.dismissed) == 5


async def test_a_waiter_does_not_take_an_end_of_another_domain_for_its_jobs(
    connections: tuple[NatsPyConnection, NatsPyConnection],
) -> None:
    here, there = connections
    ours, theirs = (
        await make_same_queue(here, "ours", sample_freq="100%"),
        await make_same_queue(there, "theirs", name=OTHER),
    )
    cursor = await take_cursor(here, ours)
    sequences = await publish(here, "ours", 3)
    await publish(there, "theirs", 3)
    for message in await pull_jobs(there, theirs, 3, consumer=OTHER):
        await message.term()

    async def all_captured() -> bool:
        return await stored_count(here, f"{QUEUE}-dead") >= 3

    await eventually(all_captured)
    for message in await pull_jobs(here, ours, 3):
        await message.ack_sync()
    report = await wait(here, cursor, sequences)
    assert (len(report.completed), report.dead) == (3, {})


@pytest.mark.slow
async def test_a_consumer_of_the_same_name_in_another_domain_is_warned_of(
    connections: tuple[NatsPyConnection, NatsPyConnection],
) -> None:
    here, there = connections
    ours, theirs = await make_same_queue(here, "ours"), await make_same_queue(there, "theirs")
    await publish(there, "theirs", 1)
    for message in await pull_jobs(there, theirs, 1):
        await message.term()

    async def is_captured() -> bool:
        return await stored_count(here, f"{QUEUE}-dead") >= 1

    await eventually(is_captured)
    findings = await find_dead_letters(here, ours)
    assert {"other-domain", "acknowledgements-cross-domains"} <= {risk.name for risk in findings.risks}


def test_a_blocking_connection_knows_its_domain(servers: tuple[NatsServer, NatsServer]) -> None:
    async def read(connection: BlockingConnection) -> str:
        await connection.discover_capabilities(())
        return connection.domain

    assert run_on_own_connection({"servers": servers[1].url}, read) == "leaf"


@pytest.mark.slow
async def test_a_queue_of_another_domain_is_used_through_the_hub(
    servers: tuple[NatsServer, NatsServer], connections: tuple[NatsPyConnection, ...]
) -> None:
    values = {"servers": (servers[0].url,), "timeout": 20, "js_domain": "leaf", "inbox_prefix": "_INBOX_far"}
    async with connect(connection_settings(values)) as far:
        assert far.domain == "leaf"
        queue = await make_queue(far, QUEUE, consumer={"ack_wait": "30s"})
        assert (await stream_info(connections[1], QUEUE))["config"]["name"] == QUEUE
        cursor = await take_cursor(far, queue)
        report = await publish_through_core(far, queue, [b"good", b"bad"], subject=f"{QUEUE}.jobs.a")
        assert report.stored == 2

        def handle(job: Delivery) -> None:
            if job.body == b"bad":
                raise GiveUpError("bad")

        worker = Worker(queue, CONSUMER, handle, connection_settings(values))
        running = asyncio.create_task(worker.run())
        ends = await wait(far, cursor, [1, 2], policy=WaitPolicy(max_dead=None))
        assert (ends.completed, set(ends.dead)) == ({1}, {2})
        worker.stop()
        await running
        redriven = await redrive_dead_letters(far, queue)
        assert list(redriven.redriven) == [2]
        assert await stored_count(connections[1], QUEUE) == 1
    # The hub has no such stream.
    with pytest.raises(NotFoundError):
        await stream_info(connections[0], QUEUE)
