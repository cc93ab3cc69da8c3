"""Jobs that wait for their next delivery are retried at once or given up; whatever may be running is left alone."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    JobNotWaitingError,
    connect,
    connection_settings,
    find_dead_letters,
    give_up_job,
    provision,
    read_attempts,
    redrive_dead_letters,
    retry_job,
    take_cursor,
    wait,
)
from airflow_provider_jetstream.worker import RetryLaterError, Worker
from testbed.crash_points import crash_at_every_call
from testbed.face import consumer_info
from testbed.queues import eventually, make_queue, process_all, publish_jobs, pull_jobs, running_worker, until_stored
from testbed.tcp_proxy import tcp_proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from airflow_provider_jetstream.worker import Delivery
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

CONSUMER = {"max_deliver": 5, "ack_wait": "1h", "backoff": ["1h"]}


@pytest.fixture
async def anywhere(any_nats: NatsServer) -> AsyncIterator[NatsPyConnection]:
    async with connect(connection_settings({"servers": (any_nats.url,)})) as opened:
        yield opened


async def waiting_queue(connection: NatsPyConnection, name: str, **fields: Any) -> WorkQueue:
    """Make a queue whose only job has failed once and waits for an hour."""
    queue = await make_queue(connection, name, attempts=True, **{"consumer": CONSUMER} | fields)
    await publish_jobs(connection, queue, ["a job"])
    await fail_once(connection, queue)
    return queue


async def fail_once(connection: NatsPyConnection, queue: WorkQueue, error: Exception | None = None) -> None:
    def fail(_: Delivery) -> None:
        raise error or ValueError("the bank is away")

    async with running_worker(Worker(queue, "worker", fail, connection.settings, name="press")):
        await eventually(lambda: attempt_that_waits(connection, queue, 1))


async def attempt_that_waits(connection: NatsPyConnection, queue: WorkQueue, number: int) -> bool:
    attempts = await read_attempts(connection, queue, 1)
    return len(attempts) == number and attempts[-1].waits_until is not None


@asynccontextmanager
async def nothing_changes(connection: NatsPyConnection, queue: WorkQueue) -> AsyncIterator[None]:
    """Check that the job isn't delivered in the block, and stays."""
    before = (await consumer_info(connection, queue.name, "worker"))["delivered"]["consumer_seq"]
    yield
    with pytest.raises(TimeoutError):
        await pull_jobs(connection, queue, 1, within=0.3)
    assert (await consumer_info(connection, queue.name, "worker"))["delivered"]["consumer_seq"] == before
    await until_stored(connection, queue.name, 1)


async def test_a_job_that_waits_is_delivered_at_once(anywhere: NatsPyConnection, name: str) -> None:
    queue = await waiting_queue(anywhere, name)
    report = await retry_job(anywhere, queue, 1, why="the bank is back", by="ann")
    assert (report.sequence, report.asked, report.attempt) == (1, "retry", 1)
    (message,) = await pull_jobs(anywhere, queue, 1)
    assert message.metadata.num_delivered == 2
    # It runs: a second request would have it run twice.
    async with nothing_changes(anywhere, queue):
        with pytest.raises(JobNotWaitingError, match=r"ann asked at .* that it be retried after attempt 1"):
            await retry_job(anywhere, queue, 1)
        with pytest.raises(JobNotWaitingError, match=r"ann asked at .* that it be retried"):
            await give_up_job(anywhere, queue, 1)
    await message.ack_sync()
    (attempt,) = await read_attempts(anywhere, queue, 1, deliveries=1)
    assert (attempt.error_message, attempt.asked) == ("the bank is away", "retried, by ann: the bank is back")


async def test_a_job_that_is_given_up_is_a_dead_letter_with_its_error(anywhere: NatsPyConnection, name: str) -> None:
    queue = await make_queue(anywhere, name, attempts=True, consumer=CONSUMER)
    cursor = await take_cursor(anywhere, queue)
    await publish_jobs(anywhere, queue, ["a job"])
    waiting = asyncio.create_task(wait(anywhere, cursor, [1]))
    await fail_once(anywhere, queue)
    report = await give_up_job(anywhere, queue, 1, why="the customer has left", by="ann")
    assert (report.asked, report.attempt) == ("give_up", 1)
    dead = (await waiting).dead
    assert "given up by ann: the customer has left" in str(dead[1])
    (letter,) = (await find_dead_letters(anywhere, queue)).letters
    assert letter.body == b"a job"
    assert letter.death.explanation == "given up by ann: the customer has left"
    assert (letter.death.error_message, letter.death.deliveries, letter.death.worker) == (
        "the bank is away",
        1,
        "press",
    )
    with pytest.raises(JobNotWaitingError, match="it isn't stored"):
        await retry_job(anywhere, queue, 1)
    assert len((await redrive_dead_letters(anywhere, queue)).redriven) == 1
    assert await process_all(anywhere, queue) == {"a job": 1}


async def test_a_job_that_asked_for_a_long_wait_is_retried_before_it(anywhere: NatsPyConnection, name: str) -> None:
    queue = await make_queue(anywhere, name, attempts=True, consumer={"max_deliver": 5, "ack_wait": "30s"})
    await publish_jobs(anywhere, queue, ["a job"])
    await fail_once(anywhere, queue, RetryLaterError(86_400))
    (attempt,) = await read_attempts(anywhere, queue, 1)
    assert attempt.at is not None
    assert attempt.waits_until is not None
    assert (attempt.waits_until - attempt.at).total_seconds() == pytest.approx(86_400, abs=60)
    await retry_job(anywhere, queue, 1)
    (message,) = await pull_jobs(anywhere, queue, 1)
    assert message.metadata.num_delivered == 2


async def test_a_running_job_is_left_alone(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, attempts=True, consumer=CONSUMER)
    await publish_jobs(connection, queue, ["a job"])
    (message,) = await pull_jobs(connection, queue, 1)
    async with nothing_changes(connection, queue):
        for ask in (retry_job, give_up_job):
            with pytest.raises(JobNotWaitingError, match="no worker has stored how an attempt at it ended"):
                await ask(connection, queue, 1)
    await message.ack_sync()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"waits_until": "2026-11-21T09:04:44Z"}, "the next one may be running"),
        ({"waits_until": None}, "didn't store until when the job waits"),
        ({"failed": False}, "has not failed"),
        ({"ack_wait": 30}, "ack wait or backoff was changed"),
        ({"deliveries": 5}, "was the last one"),
    ],
)
async def test_what_its_worker_has_not_stored_is_no_proof(
    connection: NatsPyConnection, name: str, change: dict[str, Any], found: str
) -> None:
    queue = await waiting_queue(connection, name)
    ((subject, stored),) = await stored_attempts(connection, queue)
    values = {field: value for field, value in (stored | change).items() if value is not None}
    subject = f"{subject.rpartition('.')[0]}.{values['deliveries']}"
    await connection.client.request(subject, json.dumps(values).encode())
    async with nothing_changes(connection, queue):
        with pytest.raises(JobNotWaitingError, match=found):
            await retry_job(connection, queue, 1)


async def stored_attempts(connection: NatsPyConnection, queue: WorkQueue) -> list[tuple[str, dict[str, Any]]]:
    from testbed.dead_letters import stream_messages

    messages = await stream_messages(connection, f"{queue.name}-attempts")
    return [(message.subject, json.loads(message.data)) for message in messages]


async def recreate_consumer(connection: NatsPyConnection, queue: WorkQueue) -> None:
    await connection.api(f"CONSUMER.DELETE.{queue.name}.worker")
    await provision(connection, queue)


async def recreate_stream(connection: NatsPyConnection, queue: WorkQueue) -> None:
    await connection.api(f"STREAM.DELETE.{queue.name}")
    await provision(connection, queue)
    await publish_jobs(connection, queue, ["another job"])


async def remove_uptime(connection: NatsPyConnection, queue: WorkQueue) -> None:
    # As a restart of the server does.
    await connection.api(f"CONSUMER.DELETE.{queue.name}-audit.uptime")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (recreate_consumer, "its consumer was deleted or created again"),
        (recreate_stream, "no worker has stored how an attempt at it ended"),
        (remove_uptime, "the server may have been restarted"),
    ],
)
async def test_what_makes_the_server_deliver_a_job_sooner_refuses_a_retry(
    connection: NatsPyConnection, name: str, change: Callable[..., Any], found: str
) -> None:
    queue = await waiting_queue(connection, name)
    await change(connection, queue)
    for ask in (retry_job, give_up_job):
        with pytest.raises(JobNotWaitingError, match=found):
            await ask(connection, queue, 1)
    await until_stored(connection, name, 1)


async def test_a_worker_that_has_a_job_for_longer_than_the_ack_wait_says_nothing_of_its_wait(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    consumer = {"max_deliver": 5, "ack_wait": "300ms", "backoff": ["300ms", "1h"]}
    queue = await make_queue(connection, name, attempts=True, consumer=consumer)
    await publish_jobs(connection, queue, ["a job"])

    async def fail_late(job: Delivery) -> None:
        await asyncio.sleep(0.4 if job.attempt == 1 else 0)
        raise ValueError

    async with running_worker(Worker(queue, "worker", fail_late, settings)):
        await eventually(lambda: attempt_that_waits(connection, queue, 2))
    (first, _) = await read_attempts(connection, queue, 1)
    assert first.state == "failed"
    assert first.waits_until is None


async def test_of_two_who_ask_at_once_one_is_refused(connection: NatsPyConnection, name: str) -> None:
    queue = await waiting_queue(connection, name)
    asked = await asyncio.gather(
        retry_job(connection, queue, 1), give_up_job(connection, queue, 1), return_exceptions=True
    )
    refused = [found for found in asked if isinstance(found, BaseException)]
    assert len(refused) == 1
    assert isinstance(refused[0], JobNotWaitingError)
    letters = (await find_dead_letters(connection, queue)).letters
    delivered = [] if letters else await pull_jobs(connection, queue, 1)
    assert len(letters) + len(delivered) == 1


async def retry(connection: NatsPyConnection, queue: WorkQueue) -> None:
    await retry_job(connection, queue, 1)


async def give_up(connection: NatsPyConnection, queue: WorkQueue) -> None:
    await give_up_job(connection, queue, 1, by="ann")


@pytest.mark.slow
async def test_a_killed_retry_leaves_a_job_that_waits(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, tmp_path: Path
) -> None:
    async def prepare(run: int) -> WorkQueue:
        return await waiting_queue(connection, f"{name}-{run}")

    report = await crash_at_every_call(settings.servers, "test_retries:retry", prepare, logs=tmp_path)
    delivered = []
    for queue in report.queues:
        try:
            delivered.append(len(await pull_jobs(connection, queue, 1, within=0.3)))
        except TimeoutError:
            delivered.append(0)
        await until_stored(connection, queue.name, 1)
    # Only the run that wasn't killed before its nak.
    assert delivered == [0] * (len(delivered) - 1) + [1]


@pytest.mark.slow
async def test_what_was_killed_while_it_gave_a_job_up_is_repeated(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, tmp_path: Path
) -> None:
    async def prepare(run: int) -> WorkQueue:
        return await waiting_queue(connection, f"{name}-{run}")

    report = await crash_at_every_call(settings.servers, "test_retries:give_up", prepare, logs=tmp_path)
    for queue in report.queues[:-1]:
        try:
            await give_up(connection, queue)
        except JobNotWaitingError as gone:
            assert "it isn't stored" in str(gone)  # noqa: PT017 - it was killed after its last change
    for queue in report.queues:
        (letter,) = (await find_dead_letters(connection, queue)).letters
        assert letter.body == b"a job"


@pytest.mark.parametrize("ask", [retry_job, give_up_job])
async def test_a_job_is_left_alone_where_the_server_was_restarted_while_its_wait_was_proved(
    own_nats: NatsServer, ask: Callable[..., Any]
) -> None:
    """The server has forgotten the wait, and a worker has the job again."""
    async with tcp_proxy(own_nats.port) as proxy:
        settings = {"servers": (own_nats.url,), "timeout": 10}
        async with (
            connect(connection_settings(settings)) as connection,
            connect(connection_settings(settings | {"servers": (proxy.url,)})) as asking,
        ):
            queue = await waiting_queue(connection, "q")
            proxy.pause_at(b"STREAM.MSG.GET.q ")
            asked = asyncio.create_task(ask(asking, queue, 1))
            await asyncio.wait_for(proxy.found.wait(), 10)
            proxy.cut()
            proxy.drop()
            own_nats.kill()
            own_nats.start()
            await eventually(lambda: connection.reconnects > 0)
            proxy.mend()
            with pytest.raises(JobNotWaitingError, match="the connection was lost meanwhile"):
                await asked
            assert (await read_attempts(connection, queue, 1))[-1].asked is None
            await until_stored(connection, "q", 1)
