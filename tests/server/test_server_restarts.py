"""Deaths that were reported before the server restarted, or another server of a cluster took over."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import (
    RedriveRequest,
    Selection,
    Status,
    account_for_jobs,
    connect,
    connection_settings,
    find_dead_letters,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.contract import late_ack_subject
from airflow_provider_jetstream.jetstream.errors import DeadLetterGoneError, NotFoundError
from testbed.face import NotDead, Scan, consumer_info, stream_info, summarise_dead_letters, take_snapshot
from testbed.nats_cluster import NatsCluster
from testbed.queues import (
    CONSUMER,
    eventually,
    exhaust_deliveries,
    make_dead_letters,
    make_queue,
    probe,
    process_all,
    publish_jobs,
    pull_jobs,
    stored_count,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

# After this time the server has stored what it knows of its consumers.
PERSISTED = 1.5
COUNT = 13

# The consumer whose start shows that the server was restarted.
UPTIME_CONSUMER = "uptime"


def settings_of(server: NatsServer) -> ConnectionSettings:
    return connection_settings({"servers": (server.url,), "timeout": 5})


async def finish(connection: NatsPyConnection, queue: WorkQueue, sequences: Iterable[int]) -> None:
    """Acknowledge jobs as the workers do that have them still."""
    for sequence in sequences:
        await connection.request(late_ack_subject(queue.name, CONSUMER, sequence), b"+ACK")


async def forget_deaths(server: NatsServer, name: str) -> tuple[WorkQueue, list[int], list[int]]:
    """Kill a server right after it has reported deaths, while as many others went unreported and one job runs.

    :return: the queue, the unreported dead jobs, and those whose reported death the server has forgotten
    """
    async with connect(settings_of(server)) as connection:
        queue = await make_queue(connection, name, consumer={"ack_wait": "120s"})
        await publish_jobs(connection, queue, ["running"])
        await pull_jobs(connection, queue, 1)
        unreported = await make_dead_letters(connection, queue, map(str, range(COUNT)))
        await connection.api(f"STREAM.PURGE.{name}-dead")
        reported = await publish_jobs(connection, queue, [f"held {number}" for number in range(COUNT)])
        await asyncio.sleep(PERSISTED)
        held = await pull_jobs(connection, queue, COUNT)
        # The server stores these deliveries; it would store the deaths, too, if more time passed before them.
        await asyncio.sleep(0.1)
        for message in held:
            await message.nak()
        # A probe of the package waits for a moment, in which the server stores what it knows of its consumers.
        request = json.dumps({"batch": 1, "no_wait": True, "max_bytes": 1}).encode()
        inbox = connection.client.new_inbox()
        await connection.client.subscribe(inbox)
        while await stored_count(connection, f"{name}-dead") < COUNT:
            await connection.client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{name}.{CONSUMER}", request, reply=inbox)
        server.kill()
    server.start()
    async with connect(settings_of(server)) as connection:
        if await count_alive(connection, queue) > 1:
            return queue, unreported, reported
    # On a busy machine the server may have stored the deaths after all.
    return await forget_deaths(server, f"{name}-again")


async def count_alive(connection: NatsPyConnection, queue: WorkQueue) -> int:
    info = await consumer_info(connection, queue.name, CONSUMER)
    return int(info["num_ack_pending"] + info["num_pending"])


@pytest.mark.slow
async def test_deaths_that_a_kill_has_undone_are_not_believed_though_the_numbers_agree(
    own_nats: NatsServer, name: str
) -> None:
    queue, unreported, reported = await forget_deaths(own_nats, name)
    async with connect(settings_of(own_nats)) as connection:
        name = queue.name
        info = await consumer_info(connection, name, CONSUMER)
        alive = await count_alive(connection, queue) - 1
        dead = 2 * COUNT - alive
        print(f"{alive} of {COUNT} reported deaths undone, {dead} jobs are dead by the numbers")
        found = await find_dead_letters(connection, queue)
        assert (found.letters, found.uncertain) == ((), dead)
        assert {job.status for job in found.dismissed} == {Status.UNCERTAIN}
        assert [risk.name for risk in found.risks].count("deaths-before-restart") == 1
        # Nor are they redriven, named or not.
        assert not (await redrive_dead_letters(connection, queue)).redriven
        named = RedriveRequest(Selection(sequences=frozenset(reported)))
        with pytest.raises(DeadLetterGoneError, match="it was dead before the server last restarted"):
            await redrive_dead_letters(connection, queue, named)
        # What was done runs no second time, and the others are found once nothing is in flight.
        await finish(connection, queue, [job for job in (*reported, 1) if job <= info["delivered"]["stream_seq"]])
        await process_all(connection, queue)
        found = await find_dead_letters(connection, queue)
        assert ([letter.sequence for letter in found.letters], found.uncertain) == (unreported, 0)
        assert await stored_count(connection, name) == COUNT


@pytest.mark.slow
@pytest.mark.since_server("2.11", "the pause of a consumer")
async def test_a_census_makes_them_certain(own_nats: NatsServer, name: str) -> None:
    queue, unreported, reported = await forget_deaths(own_nats, name)
    name = queue.name
    async with connect(settings_of(own_nats)) as connection:
        look = asyncio.create_task(find_dead_letters(connection, queue, census=True))

        async def is_paused() -> bool:
            return bool((await consumer_info(connection, name, CONSUMER)).get("paused"))

        await eventually(is_paused)
        # Workers finish what they have.
        info = await consumer_info(connection, name, CONSUMER)
        await finish(connection, queue, [job for job in (*reported, 1) if job <= info["delivered"]["stream_seq"]])
        found = await look
        assert ([letter.sequence for letter in found.letters], found.uncertain) == (unreported, 0)
        assert not await is_paused()


@pytest.mark.slow
async def test_deaths_after_a_restart_are_believed_once_the_server_is_watched_again(
    own_nats: NatsServer, name: str
) -> None:
    async with connect(settings_of(own_nats)) as connection:
        queue = await make_queue(connection, name, consumer={"ack_wait": "120s"})
        first = await consumer_info(connection, f"{name}-audit", UPTIME_CONSUMER)
        await publish_jobs(connection, queue, ["running"])
        await pull_jobs(connection, queue, 1)
        await make_dead_letters(connection, queue, ["before"])
        found = await find_dead_letters(connection, queue)
        assert ([letter.sequence for letter in found.letters], found.uncertain) == ([2], 0)
        await asyncio.sleep(PERSISTED)
        own_nats.kill()
    own_nats.start()
    async with connect(settings_of(own_nats)) as connection:
        with pytest.raises(NotFoundError):
            await consumer_info(connection, f"{name}-audit", UPTIME_CONSUMER)
        found = await find_dead_letters(connection, queue)
        assert ([letter.sequence for letter in found.letters], found.uncertain) == ([], 1)
        second = await consumer_info(connection, f"{name}-audit", UPTIME_CONSUMER)
        assert second["created"] > first["created"]
        await make_dead_letters(connection, queue, ["after"])
        summary = await summarise_dead_letters(connection, queue)
        assert (summary.ranges, summary.uncertain, summary.dismissed) == ([(3, 3)], 1, {"uncertain": 1})
        # Once nothing is in flight, the numbers alone decide.
        await finish(connection, queue, [1])
        found = await find_dead_letters(connection, queue)
        assert ([letter.sequence for letter in found.letters], found.uncertain) == ([2, 3], 0)


async def test_a_scan_of_an_idle_queue_begins_to_watch_the_server(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await connection.api(f"CONSUMER.DELETE.{name}-audit.{UPTIME_CONSUMER}")
    await find_dead_letters(connection, queue)
    assert (await stream_info(connection, f"{name}-audit"))["state"]["consumer_count"] == 1


async def test_a_consumer_that_survives_restarts_proves_no_uptime(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"})
    await connection.api(f"CONSUMER.DELETE.{name}-audit.{UPTIME_CONSUMER}")
    config = {"durable_name": UPTIME_CONSUMER, "name": UPTIME_CONSUMER, "ack_policy": "none"}
    request = {"stream_name": f"{name}-audit", "config": config}
    await connection.api(f"CONSUMER.CREATE.{name}-audit.{UPTIME_CONSUMER}", request)
    await publish_jobs(connection, queue, ["running"])
    await pull_jobs(connection, queue, 1)
    snapshot = await take_snapshot(connection, queue)
    assert snapshot.consumers[CONSUMER].up_since is None
    (risk,) = [risk for risk in (await find_dead_letters(connection, queue)).risks if risk.name == "restart-unknown"]
    assert "the audit's consumer in memory that shows it can't be created, or isn't in memory" in risk


async def test_without_an_audit_restarts_are_unknown_and_the_numbers_decide(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"}, audit=False)
    await publish_jobs(connection, queue, ["running"])
    await pull_jobs(connection, queue, 1)
    await make_dead_letters(connection, queue, "ab")
    found = await find_dead_letters(connection, queue)
    assert ([letter.sequence for letter in found.letters], found.uncertain) == ([2, 3], 0)
    assert "restart-unknown" in {risk.name for risk in found.risks}
    await finish(connection, queue, [1])
    assert "restart-unknown" not in {risk.name for risk in (await find_dead_letters(connection, queue)).risks}


@pytest.mark.slow
async def test_letters_of_a_scan_that_lost_the_server_are_proved_anew(own_nats: NatsServer, name: str) -> None:
    async with connect(settings_of(own_nats)) as connection:
        queue = await make_queue(connection, name, consumer={"ack_wait": "120s"})
        await publish_jobs(connection, queue, ["running"])
        await pull_jobs(connection, queue, 1)
        await make_dead_letters(connection, queue, "ab")
        scan = await Scan.begin(connection, queue)
        await asyncio.sleep(PERSISTED)
        own_nats.kill()
        own_nats.start()
        await eventually(lambda: connection.client.is_connected and connection.client.stats["reconnects"] > 0)
        assert [letter.sequence async for letter in scan.letters()] == []
        assert scan.dismissed == {Status.UNCERTAIN: 2}


@pytest.mark.slow
@pytest.mark.since_server("2.12", "since when a leader leads")
async def test_another_leader_of_a_cluster_may_have_forgotten_deaths() -> None:
    with NatsCluster() as cluster:
        async with connect(connection_settings({"servers": cluster.urls, "timeout": 10})) as connection:
            queue = await make_queue(connection, "q", consumer={"ack_wait": "120s"}, num_replicas=3)
            await publish_jobs(connection, queue, ["running"])
            await pull_jobs(connection, queue, 1)
            await publish_jobs(connection, queue, ["before"])
            await exhaust_deliveries(connection, queue, 1)
            found = await find_dead_letters(connection, queue)
            assert ([letter.sequence for letter in found.letters], found.uncertain) == ([2], 0)
            before = cluster.consumer_leader("q", CONSUMER)
            await connection.api(f"CONSUMER.LEADER.STEPDOWN.q.{CONSUMER}")
            await eventually(lambda: cluster.consumer_leader("q", CONSUMER) != before)
            await probe(connection, queue)
            found = await find_dead_letters(connection, queue)
            assert ([letter.sequence for letter in found.letters], found.uncertain) == ([], 1)
            (finding,) = [risk for risk in found.risks if risk.name == "deaths-before-restart"]
            assert "when another server led" in finding


@pytest.mark.slow
async def test_the_first_account_of_a_cluster_whose_streams_have_several_leaders() -> None:
    with NatsCluster() as cluster:
        async with connect(connection_settings({"servers": cluster.urls, "timeout": 10})) as connection:
            queue = await make_queue(connection, "q", consumer={"sample_freq": "100%"}, num_replicas=3)
            while cluster.leader("q") == cluster.leader("q-events"):
                await connection.api("STREAM.LEADER.STEPDOWN.q-events")
                cluster.wait_settled("q-events")
            await publish_jobs(connection, queue, ["done"] * 3)
            await process_all(connection, queue)
            account = await account_for_jobs(connection, queue)
            assert (account.ended, account.unaccounted, account.unknown) == (3, (), ())


@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_a_restart_that_the_connection_doesnt_show_is_noticed_at_the_next_look(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "60s"})
    await make_dead_letters(connection, queue, "ab")
    scan = await Scan.begin(connection, queue)
    letters = [letter async for letter in scan.letters()]
    await publish_jobs(connection, queue, ["running"])
    await pull_jobs(connection, queue, 1)
    # What a restart of the server behind a leaf node does, and a lost acknowledgement floor with it.
    await connection.api(f"CONSUMER.DELETE.{name}-audit.{UPTIME_CONSUMER}")
    await connection.api(f"CONSUMER.RESET.{name}.{CONSUMER}", {"seq": 1})
    await pull_jobs(connection, queue, 3)
    jobs = await scan.classify_again(letters, refresh=True)
    assert [job.status for job in jobs if isinstance(job, NotDead)] == [Status.UNCERTAIN] * 2
