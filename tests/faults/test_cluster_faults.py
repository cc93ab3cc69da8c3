"""Three servers with everything in three replicas: leaders killed -9 while jobs die and while they are redriven."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from nats import errors
from nats.js import errors as js_errors

from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.settings import connection_settings
from airflow_provider_jetstream.jetstream.client.stream_api import consumer_info
from airflow_provider_jetstream.jetstream.dead_letters.find import find_dead_letters
from airflow_provider_jetstream.jetstream.errors import ApiError, JetStreamProviderError, TransientError
from airflow_provider_jetstream.jetstream.redrive.redrive import redrive_dead_letters
from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest
from testbed.queues import CONSUMER, eventually, make_queue, stored_count

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from testbed.nats_cluster import NatsCluster

LETTERS = 1_000
CLIENT_ERRORS = (errors.Error, js_errors.Error, JetStreamProviderError, TimeoutError)
PROTOCOLS = ["copy", "atomic"] if os.environ.get("FAULTS") == "full" else ["copy"]


async def insist(work: Callable[[], Awaitable[object]]) -> None:
    """Do something that may be repeated until the cluster lets it through."""

    async def done() -> bool:
        with suppress(*CLIENT_ERRORS):
            await work()
            return True
        return False

    await eventually(done, within=60)


async def publish(connection: Connection, queue: WorkQueue) -> None:
    jetstream = connection.client.jetstream(timeout=10)

    async def one(number: int) -> None:
        headers = {"Nats-Msg-Id": f"job-{number}"}
        await insist(lambda: jetstream.publish(f"{queue.name}.jobs.a", str(number).encode(), headers=headers))

    for start in range(0, LETTERS, 100):
        await asyncio.gather(*map(one, range(start, start + 100)))


async def fail_all(connection: Connection, queue: WorkQueue) -> None:
    """Work as badly as can be: take jobs until none waits any more, and hand each back for the last time."""
    while True:
        with suppress(*CLIENT_ERRORS):
            info = await consumer_info(connection, queue.name, CONSUMER)
            if not info["num_pending"] and not info["num_ack_pending"]:
                return
            pull = await connection.client.jetstream().pull_subscribe_bind(CONSUMER, stream=queue.name)
            for message in await pull.fetch(20, timeout=0.5):
                await message.nak()
            await pull.unsubscribe()


async def do_all(connection: Connection, queue: WorkQueue) -> Counter[str]:
    done: Counter[str] = Counter()
    pull = await connection.client.jetstream().pull_subscribe_bind(CONSUMER, stream=queue.name)

    async def over() -> bool:
        with suppress(TimeoutError):
            for message in await pull.fetch(100, timeout=0.5):
                done[message.data.decode()] += 1
                await message.ack_sync(timeout=5)
        info = await consumer_info(connection, queue.name, CONSUMER)
        return not info["num_pending"] and not info["num_ack_pending"]

    await eventually(over, within=60)
    return done


async def kill_and_restart_leader(cluster: NatsCluster, stream: str) -> None:
    leader = await asyncio.to_thread(cluster.leader, stream)
    await asyncio.to_thread(cluster.kill, leader)
    # Long enough that others take over and go on without it.
    await asyncio.to_thread(cluster.leader, stream)
    await asyncio.to_thread(cluster.restart, leader)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_leaders_killed_while_jobs_die_and_while_they_are_redriven(cluster: NatsCluster, protocol: str) -> None:
    settings = connection_settings({"servers": cluster.urls, "timeout": 5})
    async with connect(settings) as connection:
        queue = await make_queue(
            connection,
            "orders",
            num_replicas=3,
            consumer={"ack_wait": "1s"},
            atomic_redrive=protocol == "atomic",
            duplicate_window="10m",
        )
        await publish(connection, queue)
        failing = asyncio.create_task(fail_all(connection, queue))
        await kill_and_restart_leader(cluster, f"{queue.name}-dead")
        await kill_and_restart_leader(cluster, queue.name)
        await asyncio.wait_for(failing, 120)
        await asyncio.to_thread(cluster.wait_settled, queue.name)

        async def all_seen() -> bool:
            with suppress(TransientError, ApiError):
                found = await find_dead_letters(connection, queue)
                return len(found.letters) == LETTERS and not found.uncertain
            return False

        await eventually(all_seen, within=60)

        bringing_back = asyncio.create_task(redrive_until_done(connection, queue, protocol))
        await eventually(lambda: some_copies(connection, queue), within=60)
        await kill_and_restart_leader(cluster, queue.name)
        await kill_and_restart_leader(cluster, f"{queue.name}-dead")
        await asyncio.wait_for(bringing_back, 180)
        await asyncio.to_thread(cluster.wait_settled, queue.name)
        assert await do_all(connection, queue) == {str(number): 1 for number in range(LETTERS)}
        found = await find_dead_letters(connection, queue)
        assert (found.letters, found.uncertain, found.undeliverable) == ((), 0, 0)
        marked = LETTERS if protocol == "atomic" else 0
        assert await stored_count(connection, queue.name) == marked


async def some_copies(connection: Connection, queue: WorkQueue) -> bool:
    with suppress(TransientError, ApiError):
        return int((await consumer_info(connection, queue.name, CONSUMER))["num_pending"]) > LETTERS // 20
    return False


async def redrive_until_done(connection: Connection, queue: WorkQueue, protocol: str) -> None:
    # Slowly enough that leaders die in the middle of it.
    order = RedriveRequest(protocol=Protocol(protocol), rate=200, run="cluster")

    async def done() -> bool:
        with suppress(TransientError, ApiError):
            report = await redrive_dead_letters(connection, queue, order)
            return not report.failures and not report.uncertain and len(report.redriven) >= LETTERS
        return False

    await eventually(done, within=170)
