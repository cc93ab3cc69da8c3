"""A stream with two priorities: ten publishers and 5,000 jobs per priority, ten high and two low workers."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.advisories import Completion, parse_advisory
from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.message_reader import read_range
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from testbed.queues import eventually, stored_count
from testbed.workers import start_worker

if TYPE_CHECKING:
    from pathlib import Path

    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
    from testbed.nats_server import NatsServer

JOBS = 5_000
PUBLISHERS = 10
WORKERS = {"high": 10, "low": 2}

STREAM: dict[str, Any] = {
    "name": "jobs",
    "subjects": ["jobs.*.*"],
    "storage": "file",
    "num_replicas": 1,
    "retention": "workqueue",
    "discard": "new",
    "max_msgs": 20_000,
    "max_msgs_per_subject": -1,
    "max_bytes": 256 * 2**20,
    "max_age": 7 * 86_400 * 1_000_000_000,
    "max_msg_size": -1,
    "duplicate_window": 120_000_000_000,
}
QUEUE = """
name: jobs
subjects: ["jobs.*.*"]
discard: new
max_msgs: 20000
max_bytes: 256MB
max_age: 7d
duplicate_window: 2m
consumers:
  - {name: high, filter_subject: "jobs.high.*", max_deliver: 5, ack_wait: 30s}
  - {name: low, filter_subject: "jobs.low.*", max_deliver: 5, ack_wait: 30s}
dead_letters: jobs_dlq
events: jobs_events
"""


async def test_ten_high_and_two_low_workers_do_every_job_once(
    nats: NatsServer, connection: NatsPyConnection, settings: ConnectionSettings, tmp_path: Path
) -> None:
    await connection.api("STREAM.CREATE.jobs", STREAM)
    (tmp_path / "jobs.yaml").write_text(QUEUE)
    (tmp_path / "work.py").write_text("def work(job):\n    pass\n")
    await provision(connection, WorkQueue.load(tmp_path / "jobs.yaml"))
    await asyncio.gather(*(publish(settings, priority) for priority in WORKERS for _ in range(PUBLISHERS)))
    assert await stored_count(connection, "jobs") == 2 * JOBS
    python_path = os.pathsep.join([str(tmp_path), *(path for path in sys.path if path)])
    workers = [
        start_worker(
            f"{priority}-{number}",
            queue=tmp_path / "jobs.yaml",
            consumer=priority,
            handler="work:work",
            env=os.environ | {"NATS_URL": nats.url, "PYTHONPATH": python_path},
            logs=tmp_path,
            concurrency=20,
        )
        for priority, count in WORKERS.items()
        for number in range(count)
    ]
    try:
        await eventually(lambda: is_empty(connection), within=120)
    finally:
        for worker in workers:
            worker.terminate()
    completions: Counter[int] = Counter()
    by_worker: Counter[str] = Counter()
    async for message in read_range(connection, "jobs_events", "completed.jobs.>"):
        completion = parse_advisory(message.data)
        assert isinstance(completion, Completion)
        completions[completion.stream_seq] += 1
        by_worker[f"{completion.consumer} by {completion.worker}"] += 1
    assert completions == dict.fromkeys(range(1, 2 * JOBS + 1), 1)
    assert sorted(by_worker) == sorted(
        f"{priority} by {priority}-{number}" for priority, count in WORKERS.items() for number in range(count)
    )
    assert sum(count for name, count in by_worker.items() if name.startswith("high")) == JOBS


async def publish(settings: ConnectionSettings, priority: str) -> None:
    """Publish one publisher's jobs, each acknowledged before the next one is sent, as ``nats bench`` does it."""
    async with connect(settings) as connection:
        for _ in range(JOBS // PUBLISHERS):
            ack = await connection.client.request(f"jobs.{priority}.my_job_id", b"x" * 128, timeout=10)
            assert json.loads(ack.data)["stream"] == "jobs"


async def is_empty(connection: NatsPyConnection) -> bool:
    return await stored_count(connection, "jobs") == 0
