"""The work queue pattern: workers that share a consumer and take ten at a time, nak, and partitions."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.jobs import Job, prepare
from airflow_provider_jetstream.jetstream.partitions import partition_of
from airflow_provider_jetstream.jetstream.provisioning import provision
from airflow_provider_jetstream.jetstream.publishing import publish
from airflow_provider_jetstream.jetstream.queue import WorkQueue
from airflow_provider_jetstream.worker import Delivery, Worker
from testbed.queues import eventually, running, stored_count

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.connection import Connection, ConnectionSettings

TASKS = 200
PARTITIONS = 3
TYPES = ["email", "resize", "notify"]


def tasks(**consumer: Any) -> WorkQueue:
    declared: dict[str, Any] = {
        "name": "TASKS",
        "subjects": ["tasks.>"],
        "consumers": [{"max_deliver": 5, "ack_wait": "30s"} | consumer],
        "dead_letters": "TASKS_DEAD",
        "events": "TASKS_EVENTS",
    }
    return WorkQueue(**declared)


async def test_workers_share_a_consumer_ten_at_a_time_and_what_is_handed_back_is_done_again(
    connection: Connection, settings: ConnectionSettings
) -> None:
    queue = tasks(name="worker")
    await provision(connection, queue)
    attempts: Counter[str] = Counter()
    by_worker: defaultdict[int, set[str]] = defaultdict(set)

    def handler(number: int) -> Any:
        async def process(job: Delivery) -> None:
            task = job.body.decode()
            attempts[task] += 1
            if job.attempt == 1 and int(task) % 10 == 0:
                raise ConnectionError("the mail server is busy")
            by_worker[number].add(task)

        return process

    async with AsyncExitStack() as stack:
        jobs = [Job(str(number), f"tasks.{TYPES[number % 3]}") for number in range(TASKS)]
        await publish(connection, prepare(jobs, subject=None, origin=None, batch="tasks"))
        for number in range(2):
            worker = Worker(queue, "worker", handler(number), settings, concurrency=10)
            await stack.enter_async_context(running(worker))
        await eventually(lambda: is_empty(connection), within=30)
    assert attempts == {str(number): 2 if number % 10 == 0 else 1 for number in range(TASKS)}
    assert all(by_worker.values())
    assert sum(map(len, by_worker.values())) == TASKS
    assert await stored_count(connection, "TASKS_EVENTS") == TASKS
    await connection.api("STREAM.DELETE.TASKS")


async def test_a_partition_has_its_own_consumer_and_a_key_stays_in_its_partition(
    connection: Connection, settings: ConnectionSettings
) -> None:
    queue = tasks(name="partitioned", filter_subject="tasks.{partition}.>", partitions=PARTITIONS)
    await provision(connection, queue)
    done: defaultdict[str, list[str]] = defaultdict(list)

    def handler(consumer: str) -> Any:
        async def process(job: Delivery) -> None:
            done[consumer].append(job.subject)

        return process

    async with AsyncExitStack() as stack:
        for number in range(PARTITIONS):
            name = f"partitioned-{number}"
            await stack.enter_async_context(running(Worker(queue, name, handler(name), settings, concurrency=10)))
        customers = [f"customer {number}" for number in range(TASKS)]
        jobs = [Job(name, f"tasks.{partition_of(name, PARTITIONS)}.email") for name in customers]
        await publish(connection, prepare(jobs, subject=None, origin=None, batch="partitions"))
        await eventually(lambda: is_empty(connection), within=30)
    for number in range(PARTITIONS):
        expected = sum(partition_of(name, PARTITIONS) == number for name in customers)
        assert done[f"partitioned-{number}"] == [f"tasks.{number}.email"] * expected
        assert expected
    await connection.api("STREAM.DELETE.TASKS")


async def is_empty(connection: Connection) -> bool:
    return await stored_count(connection, "TASKS") == 0
