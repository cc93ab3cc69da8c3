"""Stopping and lost leaders: no job is lost or needlessly repeated, and there is no busy loop."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import connect, connection_settings
from airflow_provider_jetstream.jetstream.errors import TransientError
from airflow_provider_jetstream.worker import Delivery, Worker
from testbed.face import consumer_info
from testbed.nats_cluster import NatsCluster
from testbed.queues import completion_count, eventually, make_queue, publish_jobs, running_worker, stored_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.face import NatsPyConnection


@pytest.fixture
def cluster() -> Iterator[NatsCluster]:
    """A cluster that the test may kill and restart."""
    with NatsCluster() as servers:
        yield servers


@pytest.mark.slow
async def test_jobs_that_arrive_after_the_stop_are_handed_back_and_not_pulled_again_by_the_same_worker(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 2})
    jobs: list[Delivery] = []
    worker = Worker(queue, "worker", jobs.append, settings, concurrency=5)
    async with running_worker(worker):
        await eventually(lambda: waiting_pulls(connection, name))
        worker.stop()
        # The open pull request fetches them.
        await publish_jobs(connection, queue, "abc")
    assert jobs == []
    info = await consumer_info(connection, name, "worker")
    assert info["delivered"]["consumer_seq"] <= 3
    async with running_worker(Worker(queue, "worker", jobs.append, settings, concurrency=5)):
        await eventually(lambda: len(jobs) == 3, within=3)
    assert {job.attempt for job in jobs} <= {1, 2}


@pytest.mark.slow
async def test_a_worker_that_its_handler_stops_pulls_no_other_job(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 1})
    await publish_jobs(connection, queue, "abc")
    jobs: list[bytes] = []

    async def handle(job: Delivery) -> None:
        jobs.append(job.body)
        worker.stop()

    worker = Worker(queue, "worker", handle, settings)
    async with running_worker(worker) as working:
        await eventually(working.done)
    assert jobs == [b"a"]
    assert (await consumer_info(connection, name, "worker"))["delivered"]["consumer_seq"] == 1


@pytest.mark.slow
async def test_a_job_that_arrives_after_the_stop_on_its_last_delivery_is_run_rather_than_handed_back(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 1})
    jobs: list[bytes] = []
    worker = Worker(queue, "worker", lambda job: jobs.append(job.body), settings, concurrency=5)
    async with running_worker(worker):
        await eventually(lambda: waiting_pulls(connection, name))
        worker.stop()
        await publish_jobs(connection, queue, "a")
    async with running_worker(Worker(queue, "worker", lambda job: jobs.append(job.body), settings)):
        await eventually(lambda: jobs == [b"a"])
    assert await stored_count(connection, f"{name}-dead") == 0


@pytest.mark.slow
async def test_after_the_grace_time_a_cancelled_job_is_redelivered_at_once_and_one_in_a_thread_is_not(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 3})
    started, release = threading.Event(), threading.Event()

    async def hang(_: Delivery) -> None:
        started.set()
        await asyncio.sleep(60)

    def hang_in_thread(_: Delivery) -> None:
        started.set()
        release.wait(60)

    await publish_jobs(connection, queue, ["a"])
    async with running_worker(Worker(queue, "worker", hang, settings, grace=0.1)):
        await eventually(started.is_set)
    info = await consumer_info(connection, name, "worker")
    assert (info["num_ack_pending"], info["delivered"]["consumer_seq"]) == (1, 1)
    started.clear()
    try:
        async with running_worker(Worker(queue, "worker", hang_in_thread, settings, grace=0.1)):
            # Sooner than the ack wait of thirty seconds.
            await eventually(started.is_set, within=3)
        attempts: list[int] = []
        async with running_worker(Worker(queue, "worker", lambda job: attempts.append(job.attempt), settings)):
            await asyncio.sleep(1.5)
            # The handler may still run, and its worker couldn't end it.
            assert attempts == []
    finally:
        release.set()


@pytest.mark.slow
async def test_many_threads_that_go_on_after_the_stop_raise_no_error(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 3})
    release = threading.Event()
    jobs: list[int] = []

    def hang(job: Delivery) -> None:
        jobs.append(job.sequence)
        release.wait(60)

    await publish_jobs(connection, queue, map(str, range(15)))
    try:
        async with running_worker(Worker(queue, "worker", hang, settings, concurrency=15, grace=0.1)):
            await eventually(lambda: len(jobs) == 15)
    finally:
        release.set()
    assert (await consumer_info(connection, name, "worker"))["num_ack_pending"] == 15


@pytest.mark.slow
async def test_an_async_handler_that_ignores_its_cancellation_does_not_block_the_next_job(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 1})
    release = asyncio.Event()
    done: list[bytes] = []

    async def stubborn(job: Delivery) -> None:
        while job.body == b"stubborn" and not release.is_set():
            try:
                await asyncio.wait_for(release.wait(), 60)
            except asyncio.CancelledError:
                continue
        done.append(job.body)

    await publish_jobs(connection, queue, ["stubborn", "next"])
    async with running_worker(Worker(queue, "worker", stubborn, settings, deadline=0.2)):
        await eventually(lambda: done == [b"next"])
        release.set()
        await eventually(lambda: len(done) == 2)


@pytest.mark.slow
async def test_when_leaders_are_lost_no_job_is_lost_and_requests_are_not_repeated_in_a_busy_loop(
    cluster: NatsCluster, name: str
) -> None:
    settings = connection_settings({"servers": cluster.urls, "timeout": 10})
    async with connect(settings) as connection:
        queue = await make_queue(
            connection, name, consumer={"ack_wait": "2s", "max_deliver": 10}, num_replicas=3, archive=False
        )
        await asyncio.to_thread(cluster.wait_settled, name)
        jobs: list[int] = []
        pulls: list[float] = []

        async def handle(job: Delivery) -> None:
            await asyncio.sleep(0.02)
            jobs.append(job.sequence)

        async def count(_: Msg) -> None:
            pulls.append(asyncio.get_running_loop().time())

        await connection.client.subscribe(f"$JS.API.CONSUMER.MSG.NEXT.{name}.worker", cb=count)
        async with running_worker(Worker(queue, "worker", handle, settings, concurrency=4)):
            await publish_jobs(connection, queue, map(str, range(300)))
            await eventually(lambda: len(jobs) > 20)
            leader = await asyncio.to_thread(cluster.consumer_leader, name, "worker")
            cluster.kill(leader)
            # The client may have been connected to the killed server.
            await eventually(lambda: connection.client.is_connected, within=20)

            async def empty() -> bool:
                # A request during an election may never be answered.
                with suppress(TransientError):
                    return not await stored_count(connection, name)
                return False

            await eventually(empty, within=60)
            await asyncio.to_thread(cluster.restart, leader)
            before = len(pulls)
            await asyncio.sleep(3)
            # About one request a second while the worker is idle.
            assert 1 <= len(pulls) - before < 10
        assert set(jobs) == set(range(1, 301))
        repeated = {sequence: times for sequence, times in Counter(jobs).items() if times > 1}
        # Only jobs in flight when the leader was lost may have run twice.
        assert len(repeated) <= 8
        assert await completion_count(connection, name) == 300


async def waiting_pulls(connection: NatsPyConnection, name: str) -> int:
    return int((await consumer_info(connection, name, "worker"))["num_waiting"])
