"""A worker of another consumer, with the right of that one alone, ends no wait for a job that isn't its own."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import (
    Job,
    WorkQueue,
    provision,
    publish,
    read_job_reports,
    take_cursor,
    wait,
)
from testbed.queues import completion_body, pull_jobs

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import Cursor, WaitReport
    from testbed.face import NatsPyConnection

_SECONDS = 0.5


async def _published(connection: NatsPyConnection, name: str) -> tuple[WorkQueue, Cursor, asyncio.Task[WaitReport]]:
    """Publish a job of the consumer own, the first of its queue, and wait for it."""
    queue = WorkQueue(
        name=name,
        subjects=[f"{name}.jobs.>"],
        consumers=[
            {"name": consumer, "filter_subject": f"{name}.jobs.{consumer}", "max_deliver": 2, "ack_wait": "30s"}
            for consumer in ("own", "other")
        ],
        dead_letters=f"{name}-dead",
        events=f"{name}-events",
        archive=True,
        audit=True,
    )
    await provision(connection, queue)
    cursor = await take_cursor(connection, queue)
    report = await publish(connection, queue, [Job(b"body", subject=f"{name}.jobs.own")])
    return queue, cursor, asyncio.create_task(wait(connection, cursor, report.awaited()))


async def _forge(connection: NatsPyConnection, name: str, what: str) -> None:
    if what == "a termination":
        await connection.publish(f"$JS.ACK.{name}.other.1.1.1.0.0", b"+TERM forged")
        return
    kind = "cancelled" if what == "a cancelled job" else "completion"
    await _complete(connection, name, "other", type=f"io.airflow.jetstream.v1.{kind}", result="forged")


async def _complete(connection: NatsPyConnection, name: str, consumer: str, **fields: str) -> None:
    body = json.loads(completion_body(name, 1, consumer)) | fields
    await connection.publish_acknowledged(f"completed.{name}.{consumer}.1", json.dumps(body).encode(), {})


@pytest.mark.parametrize("what", ["a completion", "a cancelled job", "a termination"])
async def test_another_consumers_worker_ends_no_wait(connection: NatsPyConnection, name: str, what: str) -> None:
    queue, cursor, waiting = await _published(connection, name)
    await _forge(connection, name, what)
    await asyncio.wait([waiting], timeout=_SECONDS)
    assert not waiting.done()
    (message,) = await pull_jobs(connection, queue, 1, consumer="own")
    await _complete(connection, name, "own", result="true")
    await message.ack()
    report = await waiting
    assert (report.completed, report.results) == ({1}, {"1": "true"})
    # What is stated later is in no report of the job either.
    await _complete(connection, name, "other", result="forged", id="later")
    ended = json.loads(json.dumps(report.as_json()))
    (job,) = [job async for job in read_job_reports(connection, cursor, ended)]
    assert (job.state, job.result) == ("completed", "true")


@pytest.mark.parametrize("what", ["a completion", "a cancelled job"])
async def test_a_job_that_its_own_worker_has_terminated_is_dead_whatever_another_one_states(
    connection: NatsPyConnection, name: str, what: str
) -> None:
    queue, _, waiting = await _published(connection, name)
    (message,) = await pull_jobs(connection, queue, 1, consumer="own")
    await _forge(connection, name, what)
    await message.term()
    report = await waiting
    assert (report.completed, list(report.dead)) == (set(), [1])
