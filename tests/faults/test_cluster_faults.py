"""A cluster with three replicas of everything: leaders are killed while jobs die and while they are redriven."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from nats import errors
from nats.js import errors as js_errors

from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    connect,
    connection_settings,
    find_dead_letters,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.errors import ApiError, JetStreamProviderError, TransientError
from testbed.face import consumer_info
from testbed.queues import CONSUMER, eventually, make_queue, stored_count

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_cluster import NatsCluster

LETTERS = 1_000
CLIENT_ERRORS = (errors.Error, js_errors.Error, JetStreamProviderError, TimeoutError)


async def retry(operation: Callable[[], Awaitable[object]]) -> None:
    """Repeat an operation until it succeeds."""

    async def done() -> bool:
        with suppress(*CLIENT_ERRORS):
            await operation()
            return True
        return False

    await eventually(done, within=60)


async def publish_jobs(connection: NatsPyConnection, queue: WorkQueue) -> None:
    jetstream = connection.client.jetstream(timeout=10)

    async def publish_one(number: int) -> None:
        headers = {"Nats-Msg-Id": f"job-{number}"}
        await retry(lambda: jetstream.publish(f"{queue.name}.jobs.a", str(number).encode(), headers=headers))

    for start in range(0, LETTERS, 100):
        await asyncio.gather(*map(publish_one, range(start, start + 100)))


async def fail_all_jobs(connection: NatsPyConnection, queue: WorkQueue) -> None:
    """Nak every job until none is pending: each has one delivery, so all become dead letters."""
    while True:
        with suppress(*CLIENT_ERRORS):
            info = await consumer_info(connection, queue.name, CONSUMER)
            if not info["num_pending"] and not info["num_ack_pending"]:
                return
            pull = await connection.client.jetstream().pull_subscribe_bind(CONSUMER, stream=queue.name)
            for message in await pull.fetch(20, timeout=0.5):
                await message.nak()
            await pull.unsubscribe()


async def process_all(connection: NatsPyConnection, queue: WorkQueue) -> Counter[str]:
    processed: Counter[str] = Counter()
    pull = await connection.client.jetstream().pull_subscribe_bind(CONSUMER, stream=queue.name)

    async def drained() -> bool:
        with suppress(TimeoutError):
            for message in await pull.fetch(100, timeout=0.5):
                processed[message.data.decode()] += 1
                await message.ack_sync(timeout=5)
        info = await consumer_info(connection, queue.name, CONSUMER)
        return not info["num_pending"] and not info["num_ack_pending"]

    await eventually(drained, within=60)
    return processed


async def kill_and_restart_leader(cluster: NatsCluster, stream: str) -> None:
    leader = await asyncio.to_thread(cluster.leader, stream)
    await asyncio.to_thread(cluster.kill, leader)
    # Restarted only after another server has taken over.
    await asyncio.to_thread(cluster.leader, stream)
    await asyncio.to_thread(cluster.restart, leader)


async def test_leaders_killed_while_jobs_die_and_while_they_are_redriven(cluster: NatsCluster) -> None:
    settings = connection_settings({"servers": cluster.urls, "timeout": 5})
    async with connect(settings) as connection:
        queue = await make_queue(
            connection,
            "orders",
            num_replicas=3,
            consumer={"ack_wait": "1s"},
            duplicate_window="10m",
        )
        await publish_jobs(connection, queue)
        failing = asyncio.create_task(fail_all_jobs(connection, queue))
        await kill_and_restart_leader(cluster, f"{queue.name}-dead")
        await kill_and_restart_leader(cluster, queue.name)
        await asyncio.wait_for(failing, 120)
        await asyncio.to_thread(cluster.wait_settled, queue.name)

        async def all_found() -> bool:
            with suppress(TransientError, ApiError):
                findings = await find_dead_letters(connection, queue)
                return len(findings.letters) == LETTERS and not findings.uncertain
            return False

        await eventually(all_found, within=60)

        redriving = asyncio.create_task(redrive_until_done(connection, queue))
        await eventually(lambda: has_copies(connection, queue), within=60)
        await kill_and_restart_leader(cluster, queue.name)
        await kill_and_restart_leader(cluster, f"{queue.name}-dead")
        await asyncio.wait_for(redriving, 180)
        await asyncio.to_thread(cluster.wait_settled, queue.name)
        assert await process_all(connection, queue) == {str(number): 1 for number in range(LETTERS)}
        findings = await find_dead_letters(connection, queue)
        assert (findings.letters, findings.uncertain, findings.undeliverable) == ((), 0, 0)
        assert await stored_count(connection, queue.name) == 0


async def has_copies(connection: NatsPyConnection, queue: WorkQueue) -> bool:
    with suppress(TransientError, ApiError):
        return int((await consumer_info(connection, queue.name, CONSUMER))["num_pending"]) > LETTERS // 20
    return False


async def redrive_until_done(connection: NatsPyConnection, queue: WorkQueue) -> None:
    # Slow enough that leaders are killed before it is finished.
    request = RedriveRequest(protocol=Protocol.COPY, rate=200, run="cluster")

    async def finished() -> bool:
        with suppress(TransientError, ApiError):
            report = await redrive_dead_letters(connection, queue, request)
            return not report.failures and not report.uncertain and len(report.redriven) >= LETTERS
        return False

    await eventually(finished, within=170)
