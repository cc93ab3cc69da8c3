"""Workers that lose their server or queue, or run out of grace time."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import connect, connection_settings, provision
from airflow_provider_jetstream.jetstream.errors import (
    NotFoundError,
    QueueDeclarationError,
    TransientError,
    UnreachableError,
)
from airflow_provider_jetstream.worker import Delivery, Worker
from testbed import seams
from testbed.face import consumer_info
from testbed.nats_cluster import NatsCluster
from testbed.priority_consumers import (
    HIGH,
    LOW,
    QueueConsumer,
    count_deliveries,
    count_in_flight,
    make_priority_consumers,
    priority_queue,
    record_pull_requests,
)
from testbed.queues import (
    completion_count,
    eventually,
    make_queue,
    publish_jobs,
    pull_jobs,
    running_worker,
    small_queue,
    stored_count,
    until_stored,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
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
    queue = await make_queue(connection, name, jobs=["a"])
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
            await until_stored(connection, name, 0)
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
            await until_stored(connection, name, 0)
        assert jobs == [1]
        assert await completion_count(connection, name) == 1


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


# A worker with several consumers waits without polling, whatever happens to its consumers and to the server.


WATCHED_SECONDS = 3.0


@pytest.fixture
def cluster() -> Iterator[NatsCluster]:
    """A cluster that the test may kill and restart."""
    with NatsCluster() as servers:
        yield servers


def empty(connection: NatsPyConnection, queue: WorkQueue) -> Callable[[], Any]:
    async def is_empty() -> bool:
        # A request while a leader is missing may never be answered.
        with suppress(TransientError):
            return not await stored_count(connection, queue.name)
        return False

    return is_empty


async def count_requests(connection: NatsPyConnection, *refs: QueueConsumer) -> int:
    async with record_pull_requests(connection, *refs) as requests:
        await asyncio.sleep(WATCHED_SECONDS)
        return len(requests)


@pytest.mark.slow
async def test_an_idle_worker_sends_one_request_a_second_to_each_consumer(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    high, low = await make_priority_consumers(connection, name)
    jobs: list[Delivery] = []
    async with running_worker(Worker(high.queue, HIGH, jobs.append, settings, fallbacks=[LOW], concurrency=9)):
        await publish_jobs(connection, low.queue, ["a"], kind=LOW)
        await eventually(lambda: len(jobs) == 1)
        # Polling every 100 ms would take more than thirty requests.
        assert 4 <= await count_requests(connection, high, low) <= 8
    assert (await count_deliveries(connection, high), await count_deliveries(connection, low)) == (0, 1)


@pytest.mark.slow
async def test_a_consumer_at_its_max_ack_pending_gets_few_requests_until_a_job_ends(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A request that the server leaves unanswered would keep the worker from the other consumer for that long.
    monkeypatch.setattr(seams.FETCHING_PULL_EXPIRES, 60)
    queue = priority_queue(name, max_ack_pending=1)
    await provision(connection, queue)
    high, low = QueueConsumer(queue, queue.consumer(HIGH)), QueueConsumer(queue, queue.consumer(LOW))
    await publish_jobs(connection, queue, ["first", "second", "third"], kind=HIGH)
    (other_worker,) = await pull_jobs(connection, queue, 1, consumer=HIGH)
    jobs: list[tuple[str, int]] = []
    release = asyncio.Event()

    async def handle(job: Delivery) -> None:
        jobs.append((job.body.decode(), job.attempt))
        if len(jobs) > 1:
            await release.wait()

    async with running_worker(Worker(queue, HIGH, handle, settings, fallbacks=[LOW])):
        await publish_jobs(connection, queue, ["other"], kind=LOW)
        await eventually(lambda: jobs == [("other", 1)])
        assert await count_requests(connection, high, low) <= 10
        await publish_jobs(connection, queue, ["long"], kind=LOW)
        await eventually(lambda: len(jobs) == 2)
        await other_worker.ack()
        # No open request fetches a job while the worker is full.
        for _ in range(10):
            assert await count_in_flight(connection, low) == 1
            assert await count_deliveries(connection, high) == 1
            await asyncio.sleep(0.05)
        release.set()
        await eventually(lambda: len(jobs) == 4)
    assert jobs == [("other", 1), ("long", 1), ("second", 1), ("third", 1)]


@pytest.mark.slow
async def test_a_paused_consumer_gets_few_requests_until_it_is_resumed(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    high, low = await make_priority_consumers(connection, name)
    await publish_jobs(connection, high.queue, ["paused"], kind=HIGH)
    await connection.api(f"CONSUMER.PAUSE.{name}.{HIGH}", {"pause_until": "2126-01-01T00:00:00Z"})
    jobs: list[str] = []
    async with running_worker(
        Worker(high.queue, HIGH, lambda job: jobs.append(job.body.decode()), settings, fallbacks=[LOW])
    ):
        await publish_jobs(connection, low.queue, ["other"], kind=LOW)
        await eventually(lambda: jobs == ["other"])
        assert await count_requests(connection, high, low) <= 10
        await connection.api(f"CONSUMER.PAUSE.{name}.{HIGH}", {})
        await eventually(lambda: jobs == ["other", "paused"])


@pytest.mark.slow
async def test_concurrent_probes_use_up_no_deliveries(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    high, low = await make_priority_consumers(connection, name)
    attempts: list[tuple[str, int]] = []

    async def fail(job: Delivery) -> None:
        attempts.append((job.body.decode(), job.attempt))
        if job.attempt < 3:
            raise ConnectionError("the printer is busy")

    async with AsyncExitStack() as stack:
        for _ in range(10):
            await stack.enter_async_context(running_worker(Worker(high.queue, HIGH, fail, settings, fallbacks=[LOW])))
        # Its ordinary pull request may take the job that a probe has detected.
        await stack.enter_async_context(running_worker(Worker(high.queue, LOW, fail, settings)))
        for number in range(10):
            await publish_jobs(connection, low.queue, [str(number)], kind=(HIGH, LOW)[number % 2])
            await eventually(empty(connection, low.queue))
    assert sorted(attempts) == sorted((str(number), attempt) for number in range(10) for attempt in (1, 2, 3))
    assert await count_in_flight(connection, high, low) == 0


@pytest.mark.slow
async def test_a_deleted_consumer_does_not_delay_the_others_and_is_served_again_once_it_is_recreated(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    high, low = await make_priority_consumers(connection, name)
    jobs: list[str] = []
    async with running_worker(
        Worker(high.queue, HIGH, lambda job: jobs.append(job.body.decode()), settings, fallbacks=[LOW])
    ):
        await publish_jobs(connection, low.queue, ["first"], kind=LOW)
        await eventually(lambda: jobs == ["first"])
        await connection.api(f"CONSUMER.DELETE.{name}.{HIGH}")
        await eventually(lambda: "Consumer Deleted" in caplog.text)
        await publish_jobs(connection, low.queue, ["second"], kind=LOW)
        await eventually(lambda: jobs == ["first", "second"])
        # Twice a second.
        assert await count_requests(connection, high) <= 9
        await eventually(lambda: "was refused: no responders (status 503)" in caplog.text)
        await provision(connection, high.queue)
        await publish_jobs(connection, high.queue, ["third"], kind=HIGH)
        await eventually(lambda: jobs == ["first", "second", "third"])


@pytest.mark.slow
async def test_a_request_that_the_consumer_refuses_is_not_repeated_in_a_busy_loop(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    high, low = await make_priority_consumers(connection, name)
    config = {"durable_name": HIGH, "filter_subject": f"{name}.jobs.{HIGH}", "ack_policy": "explicit", "max_batch": 2}
    await connection.api(
        f"CONSUMER.CREATE.{name}.{HIGH}.{config['filter_subject']}",
        {"stream_name": name, "config": {**config, "max_deliver": 3, "ack_wait": 30_000_000_000}},
    )
    await publish_jobs(connection, high.queue, ["a"], kind=HIGH)
    jobs: list[str] = []
    worker = Worker(
        high.queue, HIGH, lambda job: jobs.append(job.body.decode()), settings, fallbacks=[LOW], concurrency=5
    )
    async with running_worker(worker):
        await publish_jobs(connection, low.queue, ["other"], kind=LOW)
        await eventually(lambda: jobs == ["other"])
        # Every half second one answered probe and one refused pull request.
        assert await count_requests(connection, high) <= 16
    assert "was refused: Exceeded MaxRequestBatch of 2 (status 409)" in caplog.text


@pytest.mark.slow
async def test_after_a_killed_server_restarts_no_job_is_lost_and_every_consumer_is_served(
    own_nats: NatsServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A killed server may have forgotten its last deliveries, and never confirms their acknowledgements.
    monkeypatch.setattr(seams.ACKNOWLEDGEMENT_CONFIRM_TIMEOUT, 3)
    settings = connection_settings({"servers": (own_nats.url,), "timeout": 10})
    async with connect(settings) as connection:
        high, _ = await make_priority_consumers(connection, name)
        for kind in (HIGH, LOW):
            await publish_jobs(connection, high.queue, map(str, range(40)), kind=kind)
        jobs: list[int] = []

        async def handle(job: Delivery) -> None:
            jobs.append(job.sequence)
            await asyncio.sleep(0.02)

        async with running_worker(Worker(high.queue, HIGH, handle, settings, fallbacks=[LOW], concurrency=2)):
            await eventually(lambda: len(jobs) > 20)
            own_nats.kill()
            await asyncio.to_thread(own_nats.restart)
            await eventually(empty(connection, high.queue), within=40)
            assert set(jobs) == set(range(1, 81))
            own_nats.kill()
            # Longer than the timeout of a probe.
            await asyncio.sleep(2)
            await asyncio.to_thread(own_nats.restart)
            await eventually(lambda: connection.client.is_connected)
            for kind in (LOW, HIGH):
                await publish_jobs(connection, high.queue, ["late"], kind=kind)
            await eventually(empty(connection, high.queue))
        assert set(jobs) == set(range(1, 83))


@pytest.mark.slow
async def test_a_consumer_that_loses_its_leader_is_served_again(cluster: NatsCluster, name: str) -> None:
    settings = connection_settings({"servers": cluster.urls, "timeout": 10})
    async with connect(settings) as connection:
        queue = priority_queue(name, replicas=3)
        await provision(connection, queue)
        await asyncio.to_thread(cluster.wait_settled, name)
        jobs: list[str] = []

        async def handle(job: Delivery) -> None:
            jobs.append(job.body.decode())

        async with running_worker(Worker(queue, HIGH, handle, settings, fallbacks=[LOW], concurrency=2)):
            await publish_jobs(connection, queue, ["before"], kind=LOW)
            await eventually(lambda: jobs == ["before"])
            leader = await asyncio.to_thread(cluster.consumer_leader, name, LOW)
            await asyncio.to_thread(cluster.kill, leader)
            await eventually(lambda: connection.client.is_connected, within=20)
            await asyncio.to_thread(cluster.leader, name)
            for kind in (LOW, HIGH):
                await eventually(lambda kind=kind: stored(connection, queue, kind), within=30)  # type: ignore[misc]
            await eventually(empty(connection, queue), within=30)
            ref = QueueConsumer(queue, queue.consumer(HIGH))
            await asyncio.to_thread(cluster.consumer_leader, name, HIGH)
            assert await count_requests(connection, ref) <= 9
        assert set(jobs) == {"before", HIGH, LOW}


async def stored(connection: NatsPyConnection, queue: WorkQueue, kind: str) -> bool:
    from nats import errors
    from nats.js import errors as js_errors

    jetstream = connection.client.jetstream(timeout=2)
    with suppress(errors.Error, js_errors.Error):
        await jetstream.publish(f"{queue.name}.jobs.{kind}", kind.encode(), headers={"Nats-Msg-Id": kind})
        return True
    return False


async def test_a_pending_request_of_another_client_does_not_keep_a_job_from_the_worker(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = priority_queue(name, priority_groups=("workers",), priority_policy="overflow")
    await provision(connection, queue)
    inbox = connection.client.new_inbox()
    other_worker = await connection.client.subscribe(inbox)
    # With this overflow request open, the server answers others that requests are pending.
    pull_request = {"batch": 100, "expires": 30_000_000_000, "group": "workers", "min_pending": 1_000}
    await connection.client.publish(
        f"$JS.API.CONSUMER.MSG.NEXT.{name}.{LOW}", json.dumps(pull_request).encode(), reply=inbox
    )
    jobs: list[str] = []
    async with running_worker(
        Worker(queue, HIGH, lambda job: jobs.append(job.body.decode()), settings, fallbacks=[LOW])
    ):
        for number in range(3):
            await publish_jobs(connection, queue, [str(number)], kind=LOW)
            await eventually(lambda number=number: len(jobs) == number + 1)  # type: ignore[misc]
    assert jobs == ["0", "1", "2"]
    assert other_worker.pending_msgs == 0
