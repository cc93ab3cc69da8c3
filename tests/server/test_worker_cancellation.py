"""Jobs that are cancelled before they start and while they run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import WaitPolicy, cancel, find_dead_letters, take_cursor, wait
from airflow_provider_jetstream.worker import Delivery, Worker
from testbed.queues import eventually, make_queue, publish_jobs, running_worker, stored_count

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.face import NatsPyConnection


@pytest.mark.slow
async def test_a_job_cancelled_before_it_starts_is_never_started(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    await publish_jobs(connection, queue, ["stop"], headers={"Job-Id": "one"})
    await publish_jobs(connection, queue, ["go"], headers={"Job-Id": "two"})
    await cancel(connection, queue, "one", why="wrong price")
    started: list[str] = []

    async def handle(job: Delivery) -> None:
        started.append(job.id)

    async with running_worker(Worker(queue, "worker", handle, settings)):
        report = await wait(connection, cursor, [1, 2], policy=WaitPolicy(max_cancelled=None))
        await eventually(lambda: is_empty(connection, name))
    assert started == ["two"]
    assert (report.completed, set(report.cancelled)) == ({2}, {1})
    assert (await find_dead_letters(connection, queue)).letters == ()


@pytest.mark.slow
async def test_a_job_that_was_done_when_it_was_cancelled_is_completed_and_a_later_one_of_its_id_is_new(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    done: list[int] = []

    def handle(job: Delivery) -> None:
        done.append(job.sequence)

    async with running_worker(Worker(queue, "worker", handle, settings)):
        await publish_jobs(connection, queue, ["a"], headers={"Job-Id": "one"})
        await wait(connection, cursor, [1])
        await cancel(connection, queue, "one")
        await publish_jobs(connection, queue, ["b"], headers={"Job-Id": "one"})
        report = await wait(connection, cursor, [1, 2])
    assert done == [1, 2]
    assert (report.completed, set(report.cancelled)) == ({1, 2}, set())


async def is_empty(connection: NatsPyConnection, name: str) -> bool:
    return not await stored_count(connection, name)
