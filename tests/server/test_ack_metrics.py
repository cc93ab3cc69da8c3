"""Workers in any language that only acknowledge: the server's ack metrics are the evidence of their jobs' ends."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from nats import errors

from airflow_provider_jetstream.jetstream import WaitPolicy, connect, connection_settings, take_cursor
from airflow_provider_jetstream.worker import Worker
from testbed import seams
from testbed.face import consumer_info
from testbed.queues import (
    CONSUMER,
    eventually,
    make_queue,
    publish_jobs,
    pull_jobs,
    running_worker,
    store_completion,
    stored_count,
)
from testbed.waiters import start_waiting, wait_reports

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

JOBS = 600
FIRST = 50


async def measured(connection: NatsPyConnection, name: str, **consumer: Any) -> WorkQueue:
    """Return a queue whose consumer samples every acknowledgement, and whose workers have time on a loaded machine."""
    return await make_queue(connection, name, consumer={"sample_freq": "100%", "ack_wait": "1m", **consumer})


async def test_jobs_that_are_only_acknowledged_are_completed(connection: NatsPyConnection, name: str) -> None:
    queue = await measured(connection, name)
    mark = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, map(str, range(50)))
    early, rest = start_waiting(connection, mark, jobs[:25]), start_waiting(connection, mark, jobs[25:])
    messages = await pull_jobs(connection, queue, 50)
    for message in messages[:25]:
        await message.ack()
    (report,) = await wait_reports([early])
    assert (report.completed, report.vanished, report.results) == (set(jobs[:25]), set(), {})
    assert not rest.task.done()
    for message in messages[25:]:
        await message.ack()
    (report,) = await wait_reports([rest])
    assert report.completed == set(jobs[25:])
    (late,) = await wait_reports([start_waiting(connection, mark, jobs)])
    assert late.completed == set(jobs)


@pytest.mark.slow
async def test_a_completion_and_a_metric_of_one_job_count_once_with_the_result(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await measured(connection, name)
    mark = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, map(str, range(50)))
    last = await publish_jobs(connection, queue, ["last"], kind="by-hand")
    during = start_waiting(connection, mark, [*jobs, *last], WaitPolicy(min_completed=51))
    async with running_worker(Worker(queue, "worker", lambda job: job.sequence, settings)):

        async def told_twice() -> bool:
            return await stored_count(connection, f"{name}-events") == 102

        await eventually(told_twice)
    (report,) = await wait_reports([during])
    assert during.remaining == list(range(51))[::-1]
    assert sorted(report.results.values()) == [*jobs, *last]
    # The metrics were read before, and hide no result from a waiter that joins late.
    keeping = start_waiting(connection, await take_cursor(connection, queue), [999])
    for _ in range(2):
        (late,) = await wait_reports([start_waiting(connection, mark, jobs)])
        assert sorted(late.results.values()) == jobs
    keeping.task.cancel()


async def test_a_terminated_or_nacked_job_has_no_metric(connection: NatsPyConnection, name: str) -> None:
    queue = await measured(connection, name, max_deliver=2)
    mark = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, "abc")
    waiter = start_waiting(connection, mark, jobs, WaitPolicy(max_dead=None))
    first, second, third = await pull_jobs(connection, queue, 3)
    await first.term()
    await second.nak()
    await third.in_progress()
    (again,) = await pull_jobs(connection, queue, 1)
    assert waiter.remaining in ([], [2])
    await again.ack()
    await third.ack()
    (report,) = await wait_reports([waiter])
    assert (report.completed, set(report.dead)) == (set(jobs[1:]), {jobs[0]})


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 0.001, 0.003])
async def test_a_server_killed_during_many_acknowledgements_leaves_no_waiter_behind(
    own_nats: NatsServer, name: str, after: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.COMPARISON_INTERVAL, 0.5)
    settings = connection_settings({"servers": (own_nats.url,), "timeout": 5})
    async with connect(settings) as connection, connect(settings) as worker:
        queue = await measured(connection, name, ack_wait="2s", max_deliver=20, max_ack_pending=JOBS)
        mark = await take_cursor(connection, queue)
        jobs = await publish_jobs(connection, queue, map(str, range(JOBS)))
        waiters = [start_waiting(connection, mark, [job], WaitPolicy(max_vanished=None)) for job in jobs]
        messages = await pull_jobs(worker, queue, JOBS)

        for message in messages[:FIRST]:
            await message.ack()
        await eventually(lambda: sum(waiter.task.done() for waiter in waiters) == FIRST)
        for message in messages[FIRST:]:
            await message.ack()
        # The client sends its buffer as soon as it runs, and the server is killed meanwhile.
        await asyncio.sleep(after)
        assert own_nats.pid
        os.kill(own_nats.pid, signal.SIGKILL)
        await asyncio.to_thread(own_nats.restart)
        await eventually(lambda: connection.client.is_connected and worker.client.is_connected)
        # Jobs whose acknowledgement the crash lost are delivered again, and done.
        working = asyncio.create_task(acknowledge_all(worker, queue))
        reports = await wait_reports(waiters, within=30)
        again = await working
        vanished = set().union(*(report.vanished for report in reports))
        completed = set().union(*(report.completed for report in reports))
        # Depending on the moment of the kill: 0 to 550 whose metrics were lost, and 0 to 360 to be done again.
        print(f"of {JOBS} jobs {len(vanished)} lost their metric with the server, {again} were done again")
        assert completed | vanished == set(jobs)
        assert all(not report.awaited and not report.dead for report in reports)
        assert len(completed) >= FIRST
        assert await stored_count(connection, name) == 0


async def acknowledge_all(connection: NatsPyConnection, queue: WorkQueue) -> int:
    """Do the jobs that the queue still delivers, and count them."""
    done = 0
    pull = await connection.client.jetstream().pull_subscribe_bind(CONSUMER, stream=queue.name)
    while True:
        with suppress(TimeoutError, errors.Error):
            for message in await pull.fetch(100, timeout=0.5):
                await message.ack_sync()
                done += 1
        info = await consumer_info(connection, queue.name, CONSUMER)
        # A server before 2.12 that was killed may keep deliveries of jobs that are gone open for good.
        if not await stored_count(connection, queue.name) or not (info["num_pending"] or info["num_ack_pending"]):
            return done


@pytest.mark.slow
async def test_metrics_that_were_lost_leave_jobs_vanished_not_awaited(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.COMPARISON_INTERVAL, 0.2)
    queue = await measured(connection, name)
    mark = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, map(str, range(400)))
    waiter = start_waiting(connection, mark, jobs, WaitPolicy(max_vanished=None))
    messages = await pull_jobs(connection, queue, 400)
    for message in messages[:100]:
        await message.ack_sync()
    await eventually(lambda: len(waiter.remaining) == 100)
    # As with a server that is killed between an acknowledgement and its metric: no stream stores it.
    config = (await connection.api(f"STREAM.INFO.{name}-events"))["config"]
    only_completions = {"subjects": [subject for subject in config["subjects"] if not subject.startswith("$JS")]}
    await connection.api(f"STREAM.UPDATE.{name}-events", config | only_completions)
    for message in messages[100:200]:
        await message.ack_sync()
    await connection.api(f"STREAM.UPDATE.{name}-events", config)
    for message in messages[200:300]:
        await message.ack_sync()
    for job in jobs[300:]:
        await store_completion(connection, queue, job)
    (report,) = await wait_reports([waiter])
    assert report.vanished == {message.metadata.sequence.stream for message in messages[100:200]}
    assert report.completed == set(jobs) - report.vanished
