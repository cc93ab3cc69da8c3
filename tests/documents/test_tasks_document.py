"""The work queue pattern: workers that share a consumer with ten jobs in flight, nak, partitions and priorities."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.jetstream.publishing.job import Job, prepare_jobs
from airflow_provider_jetstream.jetstream.publishing.publisher import publish_prepared
from airflow_provider_jetstream.jetstream.queue.partitions import partition_of
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.worker import Delivery, Worker
from testbed.queues import eventually, running_worker, stored_count

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings

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


async def test_workers_share_a_consumer_and_jobs_that_fail_are_delivered_again(
    connection: NatsPyConnection, settings: ConnectionSettings
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
        await publish_prepared(connection, prepare_jobs(jobs, subject=None, origin=None, batch="tasks"))
        for number in range(2):
            worker = Worker(queue, "worker", handler(number), settings, concurrency=10)
            await stack.enter_async_context(running_worker(worker))
        await eventually(lambda: is_empty(connection), within=30)
    assert attempts == {str(number): 2 if number % 10 == 0 else 1 for number in range(TASKS)}
    assert all(by_worker.values())
    assert sum(map(len, by_worker.values())) == TASKS
    assert await stored_count(connection, "TASKS_EVENTS") == TASKS
    await connection.api("STREAM.DELETE.TASKS")


async def test_a_partition_has_its_own_consumer_and_a_key_stays_in_its_partition(
    connection: NatsPyConnection, settings: ConnectionSettings
) -> None:
    queue = tasks(name="partitioned", filter_subject="tasks.{partition}.>", partitions=PARTITIONS)
    await provision(connection, queue)
    subjects: defaultdict[str, list[str]] = defaultdict(list)

    def handler(consumer: str) -> Any:
        async def process(job: Delivery) -> None:
            subjects[consumer].append(job.subject)

        return process

    async with AsyncExitStack() as stack:
        for number in range(PARTITIONS):
            name = f"partitioned-{number}"
            await stack.enter_async_context(
                running_worker(Worker(queue, name, handler(name), settings, concurrency=10))
            )
        customers = [f"customer {number}" for number in range(TASKS)]
        jobs = [Job(name, f"tasks.{partition_of(name, PARTITIONS)}.email") for name in customers]
        await publish_prepared(connection, prepare_jobs(jobs, subject=None, origin=None, batch="partitions"))
        await eventually(lambda: is_empty(connection), within=30)
    for number in range(PARTITIONS):
        expected = sum(partition_of(name, PARTITIONS) == number for name in customers)
        assert subjects[f"partitioned-{number}"] == [f"tasks.{number}.email"] * expected
        assert expected
    await connection.api("STREAM.DELETE.TASKS")


async def test_workers_take_jobs_of_high_priority_first_and_fall_back_to_normal_ones(
    connection: NatsPyConnection, settings: ConnectionSettings
) -> None:
    high, normal = (
        WorkQueue.load(
            {
                "name": f"TASKS_{level.upper()}",
                "subjects": [f"tasks.{level}.>"],
                "consumers": [{"name": "worker", "max_deliver": 5, "ack_wait": "30s"}],
                "dead_letters": f"TASKS_{level.upper()}_DEAD",
                "events": f"TASKS_{level.upper()}_EVENTS",
            }
        )
        for level in ("high", "normal")
    )
    for queue in (high, normal):
        await provision(connection, queue)

    async def submit(queue: WorkQueue, batch: str, count: int) -> None:
        level = queue.name.removeprefix("TASKS_").lower()
        jobs = [Job(level, f"tasks.{level}.{TYPES[number % 3]}") for number in range(count)]
        await publish_prepared(connection, prepare_jobs(jobs, subject=None, origin=None, batch=batch))

    started: list[str] = []

    async def process(job: Delivery) -> None:
        started.append(job.body.decode())

    await submit(normal, "backlog", TASKS)
    await submit(high, "backlog", TASKS)
    worker = Worker(high, "worker", process, settings, fallbacks=[(normal, "worker")], concurrency=10)
    async with running_worker(worker):
        await eventually(lambda: is_empty(connection, "TASKS_HIGH", "TASKS_NORMAL"), within=30)
        last_high = len(started) - started[::-1].index("high")
        # Every tenth job is a normal one, so that none of them starves.
        assert TASKS * 10 // 9 - 10 <= last_high <= TASKS * 10 // 9 + 10
        for queue, level in ((normal, "normal"), (high, "high"), (normal, "normal")):
            before = len(started)
            await submit(queue, f"one at {before}", 1)
            await eventually(lambda: is_empty(connection, "TASKS_HIGH", "TASKS_NORMAL"))
            assert started[before:] == [level]
    for name, count in (("TASKS_HIGH", TASKS + 1), ("TASKS_NORMAL", TASKS + 2)):
        assert await stored_count(connection, f"{name}_EVENTS") == count
        await connection.api(f"STREAM.DELETE.{name}")


async def is_empty(connection: NatsPyConnection, *streams: str) -> bool:
    return not any([await stored_count(connection, stream) for stream in streams or ("TASKS",)])
