"""A stream with two priorities: ten publishers and 5,000 jobs per priority, ten high and two low workers."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from document_configurations import JOBS as DOCUMENT

from airflow_provider_jetstream.dev.worker_processes import start_worker
from airflow_provider_jetstream.jetstream import PublishError, WorkQueue, connect, discover_queue, provision
from airflow_provider_jetstream.jetstream import publish as publish_jobs
from airflow_provider_jetstream.jetstream.errors import QueueFullError
from testbed.dead_letters import stream_messages
from testbed.face import consumer_info
from testbed.foreign_programs import start_program
from testbed.ledger import read_ledger
from testbed.queues import eventually, stored_count, until_stored

if TYPE_CHECKING:
    from pathlib import Path

    from airflow_provider_jetstream.dev.process import Process
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

JOBS = 5_000
PUBLISHERS = 10
# For each priority: this package's workers, and others.
WORKERS = {"high": (8, 2), "low": (1, 1)}


@pytest.mark.slow
async def test_ten_high_and_two_low_workers_of_two_kinds_do_every_job(
    nats: NatsServer,
    connection: NatsPyConnection,
    settings: ConnectionSettings,
    tmp_path: Path,
    program_env: dict[str, str],
    ledger: Path,
) -> None:
    await DOCUMENT.create(connection)
    await provision(connection, WorkQueue.load(DOCUMENT.path))
    (tmp_path / "work.py").write_text("def work(job):\n    pass\n")
    workers = [*own_workers(nats, tmp_path), *foreign_workers(tmp_path, program_env)]
    try:
        await eventually(lambda: all_wait(connection), within=120)
        await asyncio.gather(*(publish(settings, priority) for priority in WORKERS for _ in range(PUBLISHERS)))
        await until_stored(connection, "jobs", 0, within=120)
    finally:
        for worker in workers:
            worker.terminate()
    done: Counter[int] = Counter(line["sequence"] for line in read_ledger(ledger))
    by_worker: Counter[str] = Counter(line["worker"] for line in read_ledger(ledger))
    deliveries = {line["sequence"]: line["deliveries"] for line in read_ledger(ledger)}
    for message in await stream_messages(connection, "jobs_events", "completed.jobs.>"):
        completion = json.loads(message.data)
        sequence = completion["stream_seq"]
        done[sequence] += 1
        by_worker[str(completion.get("worker"))] += 1
        deliveries[sequence] = max(completion["deliveries"], deliveries.get(sequence, 0))
    assert set(range(1, 2 * JOBS + 1)) - set(done) == set()
    # The ack wait is 1 s: while a busy machine holds a worker up for longer, the server gives its jobs to another one.
    assert {sequence: count for sequence, count in done.items() if not 1 <= count <= deliveries[sequence]} == {}
    assert len(done) == 2 * JOBS
    assert sorted(by_worker) == sorted(
        f"{priority}-{number}" for priority, counts in WORKERS.items() for number in range(sum(counts))
    )
    high = sum(count for name, count in by_worker.items() if name.startswith("high"))
    assert JOBS <= high <= JOBS + done.total() - len(done)


def own_workers(nats: NatsServer, folder: Path) -> list[Process]:
    python_path = os.pathsep.join([str(folder), *(path for path in sys.path if path)])
    return [
        start_worker(
            f"{priority}-{number}",
            queue=DOCUMENT.path,
            consumer=priority,
            handler="work:work",
            env=os.environ | {"NATS_URL": nats.url, "PYTHONPATH": python_path},
            logs=folder,
            concurrency=20,
        )
        for priority, (count, _) in WORKERS.items()
        for number in range(count)
    ]


def foreign_workers(folder: Path, program_env: dict[str, str]) -> list[Process]:
    return [
        start_program(
            f"{priority}-{own + number}",
            "foreign_jobs",
            *("work", priority, str(own + number)),
            env=program_env,
            logs=folder,
        )
        for priority, (own, count) in WORKERS.items()
        for number in range(count)
    ]


@pytest.mark.slow
async def test_the_stream_refuses_new_jobs_once_it_is_full(connection: NatsPyConnection) -> None:
    await DOCUMENT.create(connection)
    queue = WorkQueue.load(DOCUMENT.path)
    await provision(connection, queue)
    await publish_jobs(connection, queue, map(str, range(20_000)), subject="jobs.low.my_job_id")
    with pytest.raises(PublishError) as caught:
        await publish_jobs(connection, queue, ["one more"], subject="jobs.high.my_job_id")
    assert any(isinstance(failure.error, QueueFullError) for failure in caught.value.report.failures)
    assert await stored_count(connection, "jobs") == 20_000


async def test_a_dead_letter_queue_is_found_by_its_mark(connection: NatsPyConnection) -> None:
    await DOCUMENT.create(connection)
    queue = await discover_queue(connection, "jobs")
    assert queue.dead_letters is not None
    assert queue.dead_letters.name == "jobs_dlq"


async def publish(settings: ConnectionSettings, priority: str) -> None:
    """Publish one publisher's jobs, each acknowledged before the next one is sent, as ``nats bench`` does it."""
    async with connect(settings) as connection:
        for _ in range(JOBS // PUBLISHERS):
            ack = await connection.client.request(f"jobs.{priority}.my_job_id", b"x" * 128, timeout=10)
            assert json.loads(ack.data)["stream"] == "jobs"


async def all_wait(connection: NatsPyConnection) -> bool:
    """Whether every worker waits for jobs; those that start last would otherwise find none."""
    waiting = {priority: (await consumer_info(connection, "jobs", priority))["num_waiting"] for priority in WORKERS}
    return all(waiting[priority] >= sum(counts) for priority, counts in WORKERS.items())
