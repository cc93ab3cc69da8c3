"""Workers that lose their server or queue, or run out of grace time."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import connect, connection_settings
from airflow_provider_jetstream.jetstream.errors import NotFoundError, QueueDeclarationError, UnreachableError
from airflow_provider_jetstream.worker import Delivery, Worker
from testbed import seams
from testbed.face import consumer_info
from testbed.queues import (
    completion_count,
    eventually,
    make_queue,
    publish_jobs,
    running_worker,
    small_queue,
    stored_count,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer


async def streams(connection: NatsPyConnection) -> set[str]:
    return set((await connection.api("STREAM.NAMES")).get("streams") or [])


async def consumers(connection: NatsPyConnection, stream: str) -> list[str]:
    return (await connection.api(f"CONSUMER.NAMES.{stream}")).get("consumers") or []


async def test_a_missing_stream_is_named_and_nothing_is_created(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    before = await streams(connection)
    message = f"expected stream {name} on the server, found none: provision the queue first"
    with pytest.raises(NotFoundError, match=message):
        await Worker(small_queue(name), "worker", print, settings).run()
    assert await streams(connection) == before


async def test_a_missing_consumer_is_named_and_not_created(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name)
    await connection.api(f"CONSUMER.DELETE.{name}.worker")
    with pytest.raises(NotFoundError, match=f"expected consumer worker of stream {name} on the server, found none"):
        await Worker(queue, "worker", print, settings).run()
    assert await consumers(connection, name) == []


async def test_a_missing_events_stream_is_named_before_any_job_is_taken(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name)
    await publish_jobs(connection, queue, ["a"])
    await connection.api(f"STREAM.DELETE.{name}-events")
    with pytest.raises(NotFoundError, match=f"expected stream {name}-events on the server, found none"):
        await Worker(queue, "worker", print, settings).run()
    assert (await consumer_info(connection, name, "worker"))["delivered"]["consumer_seq"] == 0


async def test_settings_that_prevent_the_start_are_named(settings: ConnectionSettings, name: str) -> None:
    expected = "can't be used:\n  - expected one of its consumers (worker), found 'other'"
    with pytest.raises(QueueDeclarationError, match=re.escape(expected)):
        Worker(small_queue(name), "other", print, settings)
    with pytest.raises(ValueError, match="expected a concurrency of at least 1, found 0"):
        Worker(small_queue(name), "worker", print, settings, concurrency=0)
    nowhere = connection_settings({"servers": ("nats://127.0.0.1:1",), "timeout": 2})
    with pytest.raises(UnreachableError, match=re.escape("no NATS server reached at nats://127.0.0.1:1")):
        await Worker(small_queue(name), "worker", print, nowhere).run()


@pytest.mark.slow
async def test_a_worker_survives_a_restart_and_pulls_no_more_than_it_can_start(own_nats: NatsServer, name: str) -> None:
    settings = connection_settings({"servers": (own_nats.url,), "timeout": 5})
    async with connect(settings) as connection:
        queue = await make_queue(connection, name, consumer={"ack_wait": "30s"})
        jobs: list[int] = []
        release = asyncio.Event()

        async def handle(job: Delivery) -> None:
            jobs.append(job.sequence)
            await release.wait()

        async with running_worker(Worker(queue, "worker", handle, settings)) as worker:
            await eventually(lambda: waiting_pulls(connection, name))
            own_nats.kill()
            # Longer than several pull requests: each, if it were buffered, would fetch a job once the server is back.
            done, _ = await asyncio.wait([worker], timeout=3.5)
            assert not done
            await asyncio.to_thread(own_nats.restart)
            await eventually(lambda: connection.client.is_connected)
            await publish_jobs(connection, queue, map(str, range(8)))
            await eventually(lambda: jobs == [1])
            for _ in range(20):
                assert (await consumer_info(connection, name, "worker"))["num_ack_pending"] == 1
                await asyncio.sleep(0.05)
            release.set()

            async def empty() -> bool:
                return not await stored_count(connection, name)

            await eventually(empty)
        assert jobs == list(range(1, 9))


async def waiting_pulls(connection: NatsPyConnection, name: str) -> int:
    return int((await consumer_info(connection, name, "worker"))["num_waiting"])


async def test_a_job_that_is_running_during_a_restart_is_finished_and_not_run_again(
    own_nats: NatsServer, name: str
) -> None:
    settings = connection_settings({"servers": (own_nats.url,), "timeout": 10})
    async with connect(settings) as connection:
        queue = await make_queue(connection, name, consumer={"ack_wait": "20s"})
        jobs: list[int] = []
        release = asyncio.Event()

        async def handle(job: Delivery) -> None:
            jobs.append(job.attempt)
            await release.wait()

        async with running_worker(Worker(queue, "worker", handle, settings)):
            await publish_jobs(connection, queue, ["a"])
            await eventually(lambda: jobs == [1])
            own_nats.kill()
            # The handler ends while the server is away, so that completion and acknowledgement must wait.
            release.set()
            await asyncio.to_thread(own_nats.restart)

            async def empty() -> bool:
                return not await stored_count(connection, name)

            await eventually(empty)
        assert jobs == [1]
        assert await completion_count(connection, name) == 1


@pytest.mark.slow
async def test_refused_pull_requests_are_not_repeated_in_a_busy_loop(own_nats: NatsServer, name: str) -> None:
    settings = connection_settings({"servers": (own_nats.url,), "timeout": 5})
    async with connect(settings) as connection:
        queue = await make_queue(connection, name)
        config = (await consumer_info(connection, name, "worker"))["config"]
        config |= {"max_waiting": 1}
        await connection.api(f"CONSUMER.DELETE.{name}.worker")
        body = {"stream_name": name, "config": config, "action": "create"}
        await connection.api(f"CONSUMER.CREATE.{name}.worker", body)
        # Two workers on a consumer with max_waiting 1, then on a deleted consumer.
        async with (
            running_worker(Worker(queue, "worker", print, settings)),
            running_worker(Worker(queue, "worker", print, settings)),
        ):
            assert await messages_in_two_seconds(own_nats) < 40
            await connection.api(f"CONSUMER.DELETE.{name}.worker")
            assert await messages_in_two_seconds(own_nats) < 40


async def messages_in_two_seconds(server: NatsServer) -> int:
    before = server.monitor("varz")["in_msgs"]
    await asyncio.sleep(2)
    return int(server.monitor("varz")["in_msgs"] - before)


async def test_a_worker_takes_jobs_again_after_its_consumer_was_recreated(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name)
    jobs: list[Delivery] = []
    async with running_worker(Worker(queue, "worker", jobs.append, settings)):
        await eventually(lambda: waiting_pulls(connection, name))
        await connection.api(f"CONSUMER.DELETE.{name}.worker")
        await make_queue(connection, name)
        await publish_jobs(connection, queue, ["a"])
        await eventually(lambda: len(jobs) == 1)


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_a_job_that_the_grace_time_cuts_off_is_delivered_again_to_another_worker(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, kind: str
) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 2})
    started, release = threading.Event(), threading.Event()

    def hang(_: Delivery) -> None:
        started.set()
        release.wait(10)

    async def hang_async(_: Delivery) -> None:
        started.set()
        await asyncio.sleep(10)

    handler = hang if kind == "plain" else hang_async
    worker = Worker(queue, "worker", handler, settings, grace=0.2)
    try:
        async with asyncio.timeout(3), running_worker(worker):
            await publish_jobs(connection, queue, ["a"])
            await eventually(started.is_set)
            worker.stop()
    finally:
        release.set()
    attempts: list[int] = []
    async with running_worker(Worker(queue, "worker", lambda job: attempts.append(job.attempt), settings)):
        await eventually(lambda: attempts == [2])
    assert await completion_count(connection, name) == 1


@pytest.mark.slow
async def test_a_failing_store_of_completions_never_acknowledges_the_job(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.ACKNOWLEDGEMENT_CONFIRM_TIMEOUT, 0)
    queue = await make_queue(connection, name, consumer={"max_deliver": 50})
    attempts: list[int] = []
    async with running_worker(Worker(queue, "worker", lambda job: attempts.append(job.attempt), settings)):
        await eventually(lambda: waiting_pulls(connection, name))
        await connection.api(f"STREAM.DELETE.{name}-events")
        await publish_jobs(connection, queue, ["a"])
        await eventually(lambda: len(attempts) >= 2)
        assert await stored_count(connection, name) == 1
        await make_queue(connection, name, consumer={"max_deliver": 50})

        async def completed() -> bool:
            return await completion_count(connection, name) == 1

        await eventually(completed)
    assert await stored_count(connection, name) == 0
