"""The probe makes the server publish advisories that it withholds while no worker sends pull requests."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import find_dead_letters, redrive_dead_letters
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from testbed.face import consumer_info, consumer_names, probe_consumer
from testbed.queues import CONSUMER, make_queue, process_all, publish_jobs, pull_jobs, stored_count

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection


async def make_abandoned_queue(connection: NatsPyConnection, name: str, bodies: str) -> WorkQueue:
    """Deliver every job as often as the consumer allows, without a worker afterwards."""
    # Longer than the last pull request may stay open on a busy machine: an open one makes the server publish.
    queue = await make_queue(connection, name, consumer={"max_deliver": 2, "ack_wait": "1500ms"})
    await publish_jobs(connection, queue, bodies)
    await pull_jobs(connection, queue, len(bodies))
    await pull_jobs(connection, queue, len(bodies))
    return queue


async def pass_ack_wait(queue: WorkQueue) -> None:
    """Sleep until the ack wait of the last deliveries has passed."""
    wait = queue.consumer(CONSUMER).ack_wait or 0
    await asyncio.sleep(1.2 * wait / 1e9)


@pytest.mark.slow
async def test_without_a_worker_the_server_publishes_no_advisory_of_the_last_deaths(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_abandoned_queue(connection, name, "abc")
    await pass_ack_wait(queue)
    assert await stored_count(connection, f"{name}-dead") == 0
    assert (await consumer_info(connection, name, CONSUMER))["num_ack_pending"] == 3


@pytest.mark.slow
async def test_letters_are_found_although_every_worker_died_before_the_last_ack_wait_passed(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_abandoned_queue(connection, name, "abc")
    await pass_ack_wait(queue)
    findings = [await find_dead_letters(connection, queue) for _ in range(2)]
    assert [letter.sequence for letter in findings[-1].letters] == [1, 2, 3]
    assert await stored_count(connection, f"{name}-dead") == 3


@pytest.mark.slow
async def test_letters_without_an_advisory_are_redriven(connection: NatsPyConnection, name: str) -> None:
    queue = await make_abandoned_queue(connection, name, "abc")
    await pass_ack_wait(queue)
    report = await redrive_dead_letters(connection, queue)
    assert set(report.redriven) == {1, 2, 3}
    assert await process_all(connection, queue) == {"a": 1, "b": 1, "c": 1}


async def test_jobs_in_flight_and_undelivered_jobs_do_not_change(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 3, "ack_wait": "30s"})
    await publish_jobs(connection, queue, "abcd")
    first, second = await pull_jobs(connection, queue, 2)
    before = await consumer_info(connection, name, CONSUMER)
    for _ in range(5):
        after = await probe_consumer(connection, name, CONSUMER)
    fields = ("num_pending", "num_ack_pending", "num_redelivered", "delivered", "ack_floor")
    assert {field: after[field] for field in fields} == {field: before[field] for field in fields}
    await first.ack_sync()
    await second.ack_sync()
    assert await process_all(connection, queue) == {"c": 1, "d": 1}


async def test_fifty_probes_use_up_no_delivery(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 3, "ack_wait": "300ms"})
    await publish_jobs(connection, queue, "a")
    await pull_jobs(connection, queue, 1)
    await pass_ack_wait(queue)
    for _ in range(50):
        await probe_consumer(connection, name, CONSUMER)
    (message,) = await pull_jobs(connection, queue, 1)
    assert message.metadata.num_delivered == 2
    assert await stored_count(connection, f"{name}-dead") == 0


@pytest.mark.slow
@pytest.mark.parametrize("in_front", [3, 12])
async def test_deaths_behind_redeliverable_jobs_get_their_advisories_by_one_look(
    connection: NatsPyConnection, name: str, in_front: int
) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 2, "ack_wait": "1s"})
    await publish_jobs(connection, queue, map(str, range(3 + in_front)))
    await pull_jobs(connection, queue, 3 + in_front)
    # Due before they are pulled: a pull request that ends unanswered could use up deliveries.
    await pass_ack_wait(queue)
    await pull_jobs(connection, queue, 3)
    await pass_ack_wait(queue)
    # The server may be late, and then a second look finds what the first one didn't; not as many as there are jobs.
    for _ in range(2):
        found = len((await find_dead_letters(connection, queue)).letters)
        if found == 3:
            break
    assert (found, (await consumer_info(connection, name, CONSUMER))["num_ack_pending"]) == (3, in_front)


async def test_a_consumer_that_does_not_exist_is_named(connection: NatsPyConnection, name: str) -> None:
    await make_queue(connection, name)
    with pytest.raises(NotFoundError, match=f"expected consumer nobody of stream {name} on the server, found none"):
        await probe_consumer(connection, name, "nobody")


async def test_every_consumer_is_named(connection: NatsPyConnection, name: str) -> None:
    consumers = [
        {"name": f"c{number}", "filter_subject": f"{name}.jobs.{number}", "max_deliver": 2} for number in range(3)
    ]
    await make_queue(connection, name, consumers=consumers)
    assert sorted(await consumer_names(connection, name)) == ["c0", "c1", "c2"]


async def test_a_consumer_whose_jobs_in_flight_reach_its_limit_is_scanned(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 2, "ack_wait": "30s", "max_ack_pending": 1})
    await publish_jobs(connection, queue, "abc")
    (job,) = await pull_jobs(connection, queue, 1)
    connection.timeout = 2
    findings = await find_dead_letters(connection, queue)
    assert (findings.letters, findings.uncertain) == ((), 0)
    await job.ack_sync()
    assert await process_all(connection, queue) == {"b": 1, "c": 1}
