"""The work queue pattern: workers that fetch ten tasks, nak, partitions, priorities, delays; theirs and ours."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from document_configurations import PARTITIONS as PARTITIONS_DOCUMENT
from document_configurations import PRIORITIES
from document_configurations import TASKS as TASKS_DOCUMENT
from foreign_tasks import partition_of, publish_task, schedule_task

from airflow_provider_jetstream.jetstream import Job, WorkQueue, plan, provision, publish
from airflow_provider_jetstream.worker import Delivery, Worker
from testbed.dead_letters import stream_messages
from testbed.face import PreparedJobs, consumer_info, publish_prepared
from testbed.foreign_programs import start_program
from testbed.ledger import read_ledger
from testbed.queues import eventually, running_worker, stored_count

if TYPE_CHECKING:
    from pathlib import Path

    from airflow_provider_jetstream.dev.process import Process
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.face import NatsPyConnection

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


@pytest.mark.slow
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
        await publish_prepared(connection, PreparedJobs(jobs, subject=None, origin=None, batch="tasks"))
        for number in range(2):
            worker = Worker(queue, "worker", handler(number), settings, concurrency=10)
            await stack.enter_async_context(running_worker(worker))
        await eventually(lambda: is_empty(connection), within=30)
    assert attempts == {str(number): 2 if number % 10 == 0 else 1 for number in range(TASKS)}
    assert all(by_worker.values())
    assert sum(map(len, by_worker.values())) == TASKS
    assert await completion_count(connection, "TASKS") == TASKS


@pytest.mark.slow
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
        await publish_prepared(connection, PreparedJobs(jobs, subject=None, origin=None, batch="partitions"))
        await eventually(lambda: is_empty(connection), within=30)
    for number in range(PARTITIONS):
        expected = sum(partition_of(name, PARTITIONS) == number for name in customers)
        assert subjects[f"partitioned-{number}"] == [f"tasks.{number}.email"] * expected
        assert expected


@pytest.mark.slow
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
        await publish_prepared(connection, PreparedJobs(jobs, subject=None, origin=None, batch=batch))

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
        assert await completion_count(connection, name) == count


@pytest.mark.slow
async def test_the_patterns_worker_does_each_task_once_and_again_what_it_refused(
    connection: NatsPyConnection, tmp_path: Path, program_env: dict[str, str], ledger: Path
) -> None:
    await TASKS_DOCUMENT.create(connection)
    await provision(connection, WorkQueue.load(TASKS_DOCUMENT.path))
    bodies = [*map(str, range(60)), "fails once", "busy"]
    for number, body in enumerate(bodies):
        await connection.client.jetstream().publish(f"tasks.{TYPES[number % 3]}", body.encode())
    workers = [program(f"worker-{number}", "create", "worker", env=program_env, logs=tmp_path) for number in range(2)]
    try:
        await eventually(lambda: is_empty(connection), within=30)
    finally:
        for worker in workers:
            worker.terminate()
    assert sorted(line["task"] for line in read_ledger(ledger)) == sorted(bodies)
    assert len({line["process"] for line in read_ledger(ledger)}) == 2


async def test_what_the_patterns_worker_changes_in_its_consumer_is_seen_and_provisioned_again(
    connection: NatsPyConnection, tmp_path: Path, program_env: dict[str, str]
) -> None:
    queue = WorkQueue.load(TASKS_DOCUMENT.path)
    await provision(connection, queue)
    worker = program("worker", "create", "worker", env=program_env, logs=tmp_path)
    try:
        await eventually(lambda: has_waiting_pull(connection, "worker"))
        # The server resets what CreateOrUpdateConsumer doesn't name: a poison task would be retried for ever.
        assert (await consumer_info(connection, "TASKS", "worker"))["config"]["max_deliver"] == -1
        (step,) = (await plan(connection, queue)).changes
        assert "max_deliver" in {difference.field for difference in step.differences}
        await provision(connection, queue)
        assert (await consumer_info(connection, "TASKS", "worker"))["config"]["max_deliver"] == 5
    finally:
        worker.terminate()


@pytest.mark.slow
async def test_a_publisher_without_this_package_puts_a_type_into_the_same_partition(
    connection: NatsPyConnection, tmp_path: Path, program_env: dict[str, str], ledger: Path
) -> None:
    queue = WorkQueue.load(PARTITIONS_DOCUMENT.path)
    await provision(connection, queue)
    jobs = [Job(f"ours {kind}", f"tasks.{{partition}}.{kind}", partition_key=kind) for kind in TYPES]
    await publish(connection, queue, jobs)
    for kind in TYPES:
        await publish_task(connection.client, kind, f"theirs {kind}".encode(), PARTITIONS)
    workers = [
        program(f"worker-{number}", "bind", f"worker-{number}", env=program_env, logs=tmp_path)
        for number in range(PARTITIONS)
    ]
    try:
        await eventually(lambda: is_empty(connection), within=30)
    finally:
        for worker in workers:
            worker.terminate()
    by_task = {line["task"]: (line["worker"], line["subject"]) for line in read_ledger(ledger)}
    for kind in TYPES:
        partition = partition_of(kind, PARTITIONS)
        assert (
            by_task[f"ours {kind}"]
            == by_task[f"theirs {kind}"]
            == (
                f"worker-{partition}",
                f"tasks.{partition}.{kind}",
            )
        )


@pytest.mark.slow
async def test_the_patterns_worker_takes_all_tasks_of_high_priority_first(
    connection: NatsPyConnection, tmp_path: Path, program_env: dict[str, str], ledger: Path
) -> None:
    for document in PRIORITIES:
        await document.create(connection)
        await provision(connection, WorkQueue.load(document.path))
    for level in ("normal", "high"):
        for number in range(25):
            await connection.client.jetstream().publish(f"tasks.{level}.email", f"{level} {number}".encode())
    worker = program("worker", "poll", env=program_env, logs=tmp_path)
    try:
        await eventually(lambda: is_empty(connection, "TASKS_HIGH", "TASKS_NORMAL"), within=30)
    finally:
        worker.terminate()
    levels = [line["task"].partition(" ")[0] for line in read_ledger(ledger)]
    assert levels == ["high"] * 25 + ["normal"] * 25


@pytest.mark.slow
async def test_a_task_that_any_publisher_schedules_is_started_at_its_time(
    connection: NatsPyConnection, settings: ConnectionSettings
) -> None:
    queue = WorkQueue.load(TASKS_DOCUMENT.path)
    await provision(connection, queue)
    # The header has whole seconds.
    due = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=3)
    started: dict[str, datetime] = {}

    async def process(job: Delivery) -> None:
        started[job.body.decode()] = datetime.now(UTC)

    await schedule_task(connection.client, "tasks.email", due, b"later")
    await connection.client.jetstream().publish("tasks.email", b"now")
    async with running_worker(Worker(queue, "worker", process, settings)):
        await eventually(lambda: is_empty(connection))
    assert started["now"] < due <= started["later"]


def program(name: str, *arguments: str, env: dict[str, str], logs: Path) -> Process:
    return start_program(name, "foreign_tasks", *arguments, env=env, logs=logs)


async def completion_count(connection: NatsPyConnection, queue: str) -> int:
    return len([None for _ in await stream_messages(connection, f"{queue}_EVENTS", f"completed.{queue}.>")])


async def has_waiting_pull(connection: NatsPyConnection, consumer: str) -> bool:
    return bool((await consumer_info(connection, "TASKS", consumer))["num_waiting"])


async def is_empty(connection: NatsPyConnection, *streams: str) -> bool:
    return not any([await stored_count(connection, stream) for stream in streams or ("TASKS",)])
