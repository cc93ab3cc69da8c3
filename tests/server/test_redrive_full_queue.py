"""The jobs queue of its source document, filled up by its dead letters."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    PublishIncompleteError,
    RedriveRequest,
    WorkQueue,
    connect,
    connection_settings,
    provision,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.errors import QueueFullError
from testbed.face import prepare_jobs, publish_prepared
from testbed.queues import eventually, probe, stored_count

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import PublishReport
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

# The document's limit is 20,000 jobs.
MANY = 5_000
ACKNOWLEDGED, FAILED = b"+ACK", b"-NAK"

JOBS = WorkQueue(
    name="jobs",
    subjects=["jobs.*.*"],
    discard="new",
    max_msgs=MANY,
    max_bytes="256MB",
    max_age="7d",
    duplicate_window="2m",
    consumers=[
        {
            "name": kind,
            "filter_subject": f"jobs.{kind}.*",
            "max_deliver": 1,
            "ack_wait": "5s",
            "max_ack_pending": -1,
        }
        for kind in ("high", "low")
    ],
    dead_letters="jobs_dlq",
)


async def publish_jobs(connection: NatsPyConnection, kind: str, count: int) -> PublishReport:
    bodies = (f"{kind}-{number}" for number in range(count))
    jobs = prepare_jobs(bodies, subject=f"jobs.{kind}.my_job_id", origin=None, batch=f"{kind}-{count}")
    return await publish_prepared(connection, jobs)


async def answer_all(connection: NatsPyConnection, kind: str, answer: bytes) -> Counter[bytes]:
    """Settle every job that a consumer delivers, many at a time."""
    done: Counter[bytes] = Counter()
    pull = await connection.client.jetstream().pull_subscribe_bind(kind, stream="jobs")
    while (await pull.consumer_info()).num_pending:
        for message in await pull.fetch(1_000):
            done[message.data] += 1
            await connection.client.publish(message.reply, answer)
        await connection.client.flush()
    await pull.unsubscribe()
    return done


@pytest.mark.since_server("2.14", "the reset of a consumer")
@pytest.mark.slow
async def test_a_queue_filled_by_its_dead_letters_accepts_jobs_again(own_nats: NatsServer) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 10})) as connection:
        await provision(connection, JOBS)
        for kind in ("high", "low"):
            (await publish_jobs(connection, kind, MANY // 2)).raise_for_failures()
            assert (await answer_all(connection, kind, FAILED)).total() == MANY // 2

        async def all_dead() -> bool:
            for kind in ("high", "low"):
                await probe(connection, JOBS, consumer=kind)
            return await stored_count(connection, "jobs_dlq") == MANY

        await eventually(all_dead)
        refused = await publish_jobs(connection, "high", 3)
        assert all(isinstance(failure.error, QueueFullError) for failure in refused.failures)
        expected = (
            r"^0 of 3 jobs are stored; 3 are not known to be: job 0 .* is not stored: jobs is full \(maximum messages"
        )
        with pytest.raises(PublishIncompleteError, match=expected):
            refused.raise_for_failures()

        started = time.monotonic()
        report = await redrive_dead_letters(connection, JOBS, RedriveRequest(why="the workers are repaired"))
        print(f"{MANY} letters in place in {time.monotonic() - started:.1f} s")
        report.raise_for_failures()
        assert (report.protocol, len(report.redriven), len(report.gone)) == (Protocol.IN_PLACE, MANY, 0)
        assert await stored_count(connection, "jobs") == MANY
        for kind in ("high", "low"):
            done = await answer_all(connection, kind, ACKNOWLEDGED)
            assert done == {f"{kind}-{number}".encode(): 1 for number in range(MANY // 2)}

        async def drained() -> bool:
            return await stored_count(connection, "jobs") == 0

        await eventually(drained)
        assert await stored_count(connection, "jobs_dlq") == 0
        (await publish_jobs(connection, "high", 3)).raise_for_failures()
