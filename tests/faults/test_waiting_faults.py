"""Many wait while their server is killed, cut off, or loses a leader: all learn how their jobs ended.

``FAULTS=full`` cuts off for half a minute; the short form for a few seconds.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from nats import errors
from nats.js import errors as js_errors

from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.settings import connection_settings
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.jetstream.waiting.cursor import take_cursor
from testbed.queues import CONSUMER, eventually, make_queue, publish_jobs, store_completion
from testbed.tcp_proxy import tcp_proxy
from testbed.waiters import start_waiting, store_completions, wait_reports

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from testbed.nats_cluster import NatsCluster
    from testbed.nats_server import NatsServer
    from testbed.waiters import Waiter

FULL = os.environ.get("FAULTS") == "full"
CUT_OFF = 30.0 if FULL else 6.0
WAITERS = 1_000
CLIENT_ERRORS = (errors.Error, js_errors.Error, JetStreamProviderError, TimeoutError)


async def insist_completing(connection: Connection, queue: WorkQueue, jobs: Sequence[int]) -> None:
    """Store completions as workers do that try again until they are stored."""

    async def one(job: int) -> None:
        while True:
            with suppress(*CLIENT_ERRORS):
                await store_completion(connection, queue, job)
                return
            await asyncio.sleep(0.2)

    for start in range(0, len(jobs), 100):
        await asyncio.gather(*map(one, jobs[start : start + 100]))


async def everyone(connection: Connection, queue: WorkQueue, count: int) -> tuple[list[int], list[Waiter]]:
    """Have so many wait for a job each, and for a first one that has ended: then all are known to listen."""
    mark = await take_cursor(connection, queue)
    first, *jobs = await publish_jobs(connection, queue, map(str, range(count + 1)))
    waiters = [start_waiting(connection, mark, [first, job]) for job in jobs]
    await store_completion(connection, queue, first)
    await eventually(lambda: all(waiter.remaining == [1] for waiter in waiters))
    return jobs, waiters


def assert_all_completed(jobs: Sequence[int], waiters: Sequence[Waiter], found: Sequence[object]) -> None:
    assert len(found) == len(jobs) == len(waiters)
    # Told of the first job and of their own, once each.
    assert {tuple(waiter.remaining) for waiter in waiters} == {(1, 0)}


async def test_a_server_killed_and_restarted_while_a_thousand_wait(own_nats: NatsServer, name: str) -> None:
    settings = connection_settings({"servers": (own_nats.url,), "timeout": 5})
    async with connect(settings) as connection, connect(settings) as worker:
        queue = await make_queue(connection, name, consumer={"ack_wait": "5m"})
        jobs, waiters = await everyone(connection, queue, WAITERS)
        working = asyncio.create_task(insist_completing(worker, queue, jobs))
        await eventually(lambda: sum(waiter.task.done() for waiter in waiters) > WAITERS // 4)
        own_nats.kill()
        assert not all(waiter.task.done() for waiter in waiters)
        await asyncio.to_thread(own_nats.restart)
        await working
        found = await wait_reports(waiters, within=20)
    assert_all_completed(jobs, waiters, found)
    assert [report.completed - {jobs[0] - 1} for report in found] == [{job} for job in jobs]


async def test_the_server_is_cut_off_from_a_thousand_who_wait(own_nats: NatsServer, name: str) -> None:
    async with (
        tcp_proxy(own_nats.port) as cable,
        connect(connection_settings({"servers": (own_nats.url,), "timeout": 5})) as worker,
        connect(connection_settings({"servers": (cable.url,), "timeout": 2})) as connection,
    ):
        queue = await make_queue(worker, name, consumer={"ack_wait": "5m"})
        jobs, waiters = await everyone(connection, queue, WAITERS)
        cable.pause()
        async with asyncio.timeout(CUT_OFF + 10):
            await asyncio.gather(asyncio.sleep(CUT_OFF), store_completions(worker, queue, jobs[:700]))
        assert not any(waiter.task.done() for waiter in waiters)
        cable.resume()
        await wait_reports(waiters[:700], within=20)
        await store_completions(worker, queue, jobs[700:])
        found = await wait_reports(waiters, within=20)
    assert_all_completed(jobs, waiters, found)


async def test_leaders_killed_while_hundreds_wait(cluster: NatsCluster) -> None:
    settings = connection_settings({"servers": cluster.urls, "timeout": 5})
    async with connect(settings) as connection, connect(settings) as worker:
        queue = await make_queue(connection, "orders", num_replicas=3, consumer={"ack_wait": "5m"})
        jobs, waiters = await everyone(connection, queue, 300)
        for stream, part in ((f"{queue.name}-events", jobs[:150]), (queue.name, jobs[150:])):
            working = asyncio.create_task(insist_completing(worker, queue, part))
            leader = await asyncio.to_thread(cluster.leader, stream)
            await asyncio.to_thread(cluster.kill, leader)
            await asyncio.wait_for(working, 60)
            await asyncio.to_thread(cluster.leader, stream)
            await asyncio.to_thread(cluster.restart, leader)
        found = await wait_reports(waiters, within=60)
    assert_all_completed(jobs, waiters, found)


async def test_dead_letters_come_through_a_dead_letter_queue_whose_leader_is_killed(cluster: NatsCluster) -> None:
    settings = connection_settings({"servers": cluster.urls, "timeout": 5})
    async with connect(settings) as connection:
        queue = await make_queue(connection, "orders", num_replicas=3, consumer={"ack_wait": "2s"})
        mark = await take_cursor(connection, queue)
        jobs = await publish_jobs(connection, queue, map(str, range(100)))
        waiters = [start_waiting(connection, mark, [job]) for job in jobs]
        leader = await asyncio.to_thread(cluster.leader, f"{queue.name}-dead")
        pull = await connection.client.jetstream().pull_subscribe_bind(CONSUMER, stream=queue.name)
        for message in await pull.fetch(50, timeout=5):
            await message.nak()
        await asyncio.to_thread(cluster.kill, leader)

        async def hand_back() -> bool:
            with suppress(*CLIENT_ERRORS):
                for message in await pull.fetch(50, timeout=0.5):
                    await message.nak()
            return all(waiter.task.done() for waiter in waiters)

        await eventually(hand_back, within=90)
        found = await wait_reports(waiters)
    assert [set(report.dead) for report in found] == [{job} for job in jobs]
