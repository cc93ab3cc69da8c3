"""Many waits run while their server is killed, unreachable, or loses a leader; each one gets the end of its jobs.

``FAULTS=full`` makes the server unreachable for half a minute, the short form for a few seconds.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from nats import errors
from nats.js import errors as js_errors

from airflow_provider_jetstream.jetstream import connect, connection_settings, take_cursor
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from testbed.queues import CONSUMER, eventually, make_queue, publish_jobs, store_completion
from testbed.tcp_proxy import tcp_proxy
from testbed.waiters import start_waiting, store_completions, wait_reports

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_cluster import NatsCluster
    from testbed.nats_server import NatsServer
    from testbed.waiters import Waiter

FULL = os.environ.get("FAULTS") == "full"
UNREACHABLE_SECONDS = 30.0 if FULL else 6.0
WAITERS = 1_000
CLIENT_ERRORS = (errors.Error, js_errors.Error, JetStreamProviderError, TimeoutError)


async def store_completions_with_retries(connection: NatsPyConnection, queue: WorkQueue, jobs: Sequence[int]) -> None:
    """Store completions as a worker does: it tries again until they are stored."""

    async def store_one(job: int) -> None:
        while True:
            with suppress(*CLIENT_ERRORS):
                await store_completion(connection, queue, job)
                return
            await asyncio.sleep(0.2)

    for start in range(0, len(jobs), 100):
        await asyncio.gather(*map(store_one, jobs[start : start + 100]))


async def start_waiters(connection: NatsPyConnection, queue: WorkQueue, count: int) -> tuple[list[int], list[Waiter]]:
    """Start a wait per job; each also waits for a first job, whose end shows that all of them follow the events."""
    cursor = await take_cursor(connection, queue)
    first, *jobs = await publish_jobs(connection, queue, map(str, range(count + 1)))
    waiters = [start_waiting(connection, cursor, [first, job]) for job in jobs]
    await store_completion(connection, queue, first)
    await eventually(lambda: all(waiter.remaining == [1] for waiter in waiters))
    return jobs, waiters


def assert_all_completed(jobs: Sequence[int], waiters: Sequence[Waiter], reports: Sequence[object]) -> None:
    assert len(reports) == len(jobs) == len(waiters)
    # Each saw the first job and its own end once.
    assert {tuple(waiter.remaining) for waiter in waiters} == {(1, 0)}


async def test_a_thousand_waits_survive_a_server_that_is_killed_and_restarted(own_nats: NatsServer, name: str) -> None:
    settings = connection_settings({"servers": (own_nats.url,), "timeout": 5})
    async with connect(settings) as connection, connect(settings) as worker:
        queue = await make_queue(connection, name, consumer={"ack_wait": "5m"})
        jobs, waiters = await start_waiters(connection, queue, WAITERS)
        storing = asyncio.create_task(store_completions_with_retries(worker, queue, jobs))
        await eventually(lambda: sum(waiter.task.done() for waiter in waiters) > WAITERS // 4)
        own_nats.kill()
        assert not all(waiter.task.done() for waiter in waiters)
        await asyncio.to_thread(own_nats.restart)
        await storing
        reports = await wait_reports(waiters, within=20)
    assert_all_completed(jobs, waiters, reports)
    assert [report.completed - {jobs[0] - 1} for report in reports] == [{job} for job in jobs]


async def test_a_thousand_waits_survive_an_unreachable_server(own_nats: NatsServer, name: str) -> None:
    async with (
        tcp_proxy(own_nats.port) as proxy,
        connect(connection_settings({"servers": (own_nats.url,), "timeout": 5})) as worker,
        connect(connection_settings({"servers": (proxy.url,), "timeout": 2})) as connection,
    ):
        queue = await make_queue(worker, name, consumer={"ack_wait": "5m"})
        jobs, waiters = await start_waiters(connection, queue, WAITERS)
        proxy.pause()
        async with asyncio.timeout(UNREACHABLE_SECONDS + 10):
            await asyncio.gather(asyncio.sleep(UNREACHABLE_SECONDS), store_completions(worker, queue, jobs[:700]))
        assert not any(waiter.task.done() for waiter in waiters)
        proxy.resume()
        await wait_reports(waiters[:700], within=20)
        await store_completions(worker, queue, jobs[700:])
        reports = await wait_reports(waiters, within=20)
    assert_all_completed(jobs, waiters, reports)


async def test_hundreds_of_waits_survive_leaders_that_are_killed(cluster: NatsCluster) -> None:
    settings = connection_settings({"servers": cluster.urls, "timeout": 5})
    async with connect(settings) as connection, connect(settings) as worker:
        queue = await make_queue(connection, "orders", num_replicas=3, consumer={"ack_wait": "5m"})
        jobs, waiters = await start_waiters(connection, queue, 300)
        for stream, ended in ((f"{queue.name}-events", jobs[:150]), (queue.name, jobs[150:])):
            storing = asyncio.create_task(store_completions_with_retries(worker, queue, ended))
            leader = await asyncio.to_thread(cluster.leader, stream)
            await asyncio.to_thread(cluster.kill, leader)
            await asyncio.wait_for(storing, 60)
            await asyncio.to_thread(cluster.leader, stream)
            await asyncio.to_thread(cluster.restart, leader)
        reports = await wait_reports(waiters, within=60)
    assert_all_completed(jobs, waiters, reports)


async def test_waits_get_dead_letters_although_the_leader_of_their_queue_is_killed(cluster: NatsCluster) -> None:
    settings = connection_settings({"servers": cluster.urls, "timeout": 5})
    async with connect(settings) as connection:
        queue = await make_queue(connection, "orders", num_replicas=3, consumer={"ack_wait": "2s"})
        cursor = await take_cursor(connection, queue)
        jobs = await publish_jobs(connection, queue, map(str, range(100)))
        waiters = [start_waiting(connection, cursor, [job]) for job in jobs]
        leader = await asyncio.to_thread(cluster.leader, f"{queue.name}-dead")
        pull = await connection.client.jetstream().pull_subscribe_bind(CONSUMER, stream=queue.name)
        for message in await pull.fetch(50, timeout=5):
            await message.nak()
        await asyncio.to_thread(cluster.kill, leader)

        async def nak_redelivered() -> bool:
            with suppress(*CLIENT_ERRORS):
                for message in await pull.fetch(50, timeout=0.5):
                    await message.nak()
            return all(waiter.task.done() for waiter in waiters)

        await eventually(nak_redelivered, within=90)
        reports = await wait_reports(waiters)
    assert [set(report.dead) for report in reports] == [{job} for job in jobs]
