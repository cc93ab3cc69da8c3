"""Workers with strict priorities: no job of a consumer is started while a more urgent one has any."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import provision
from airflow_provider_jetstream.worker import Delivery, Worker
from testbed.priority_consumers import HIGH, LOW, make_priority_consumers, priority_queue
from testbed.queues import eventually, publish_jobs, running_worker

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.face import NatsPyConnection


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 20])
async def test_every_urgent_job_is_started_before_any_other(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, slots: int
) -> None:
    names = (HIGH, "mid", LOW)
    queue = priority_queue(name, *names)
    await provision(connection, queue)
    for kind in reversed(names):
        await publish_jobs(connection, queue, [kind] * 100, kind=kind)
    started: list[str] = []

    async def handle(job: Delivery) -> None:
        started.append(job.body.decode())

    worker = Worker(queue, HIGH, handle, settings, fallbacks=names[1:], concurrency=slots, priorities="strict")
    async with running_worker(worker):
        await eventually(lambda: len(started) == 300, within=30)
    assert started == [kind for kind in names for _ in range(100)]


@pytest.mark.slow
async def test_urgent_jobs_that_keep_coming_starve_the_others(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    high, low = await make_priority_consumers(connection, name, streams=2)
    await publish_jobs(connection, low.queue, [LOW] * 5)
    await publish_jobs(connection, high.queue, [HIGH] * 5)
    started: list[str] = []

    async def handle(job: Delivery) -> None:
        started.append(job.body.decode())
        if job.body == HIGH.encode() and len(started) <= 50:
            # Another one before this one is done, so that there always are some.
            await publish_jobs(connection, high.queue, [HIGH])

    worker = Worker(
        high.queue, "worker", handle, settings, fallbacks=[(low.queue, "worker")], concurrency=2, priorities="strict"
    )
    async with running_worker(worker):
        await eventually(lambda: len(started) == 60, within=20)
    assert started == [HIGH] * 55 + [LOW] * 5


@pytest.mark.slow
async def test_a_job_of_any_consumer_starts_on_an_idle_worker(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    high, low = await make_priority_consumers(connection, name)
    started: list[str] = []
    worker = Worker(
        high.queue, HIGH, lambda job: started.append(job.body.decode()), settings, fallbacks=[LOW], priorities="strict"
    )
    expected: list[str] = []
    async with running_worker(worker):
        for ref, kind in ((low, LOW), (high, HIGH), (low, LOW), (high, HIGH)):
            await publish_jobs(connection, ref.queue, [kind], kind=kind)
            expected.append(kind)
            await eventually(lambda: started == expected, within=2)


@pytest.mark.slow
async def test_a_consumer_that_has_all_its_jobs_in_flight_does_not_hold_up_the_others(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = priority_queue(name, max_ack_pending=1)
    await provision(connection, queue)
    await publish_jobs(connection, queue, [HIGH] * 3, kind=HIGH)
    await publish_jobs(connection, queue, [LOW] * 3, kind=LOW)
    started: list[str] = []
    release = asyncio.Event()

    async def handle(job: Delivery) -> None:
        started.append(job.body.decode())
        if job.body == HIGH.encode():
            await release.wait()

    worker = Worker(queue, HIGH, handle, settings, fallbacks=[LOW], concurrency=3, priorities="strict")
    async with running_worker(worker):
        await eventually(lambda: started == [HIGH, LOW, LOW, LOW])
        release.set()
        await eventually(lambda: len(started) == 6)


def test_an_unknown_order_is_refused(settings: ConnectionSettings, name: str) -> None:
    with pytest.raises(ValueError, match="expected priorities of fair or strict, found 'none'"):
        Worker(priority_queue(name), HIGH, print, settings, fallbacks=[LOW], priorities="none")  # type: ignore[arg-type]
