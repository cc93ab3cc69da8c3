"""The comparison with the server ends waits for jobs whose end has no event."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import WaitPolicy, connect, connection_settings, take_cursor
from testbed import seams
from testbed.face import consumer_info
from testbed.queues import (
    CONSUMER,
    eventually,
    make_queue,
    publish_jobs,
    pull_jobs,
    store_completion,
    stored_count,
    wait_for_entries,
)
from testbed.waiters import start_waiting, store_completions, wait_reports

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

pytestmark = pytest.mark.usefixtures("short_interval")

NO_ADVISORY = "used up its deliveries without an advisory"
ANY = WaitPolicy(max_dead=None, max_unaccounted=None)


@pytest.fixture
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams.COMPARISON_INTERVAL, 0.3)


async def test_a_job_whose_completion_is_stored_after_it_is_gone_is_completed(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    (job,) = await publish_jobs(connection, queue, "a")
    # The server answers each look for the job, and this test hears of it.
    looks = await connection.client.subscribe(f"$JS.API.STREAM.MSG.GET.{name}")
    waiter = start_waiting(connection, cursor, [job])
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": job})
    await looks.next_msg(timeout=10)
    await store_completion(connection, queue, job)
    (report,) = await wait_reports([waiter])
    assert (set(report.completed), report.unaccounted) == ({job}, set())


@pytest.mark.parametrize("how", ["purged", "purged in part", "deleted", "expired"])
@pytest.mark.parametrize("delivered", [False, True])
async def test_jobs_that_leave_the_queue_while_they_are_waited_for_are_unaccounted(
    connection: NatsPyConnection, name: str, how: str, *, delivered: bool
) -> None:
    expiring = {"max_age": "1s", "duplicate_window": "1s"} if how == "expired" else {}
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"}, **expiring)
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, map(str, range(5)))
    waiter = start_waiting(connection, cursor, jobs, ANY)
    if delivered:
        await pull_jobs(connection, queue, 5)
    if how == "purged":
        await connection.api(f"STREAM.PURGE.{name}")
    elif how == "purged in part":
        await connection.api(f"STREAM.PURGE.{name}", {"filter": f"{name}.jobs.plain"})
    elif how == "deleted":
        for job in jobs:
            await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": job})
    (report,) = await wait_reports([waiter])
    assert (report.unaccounted, report.dead) == (set(jobs), {})


@pytest.mark.slow
async def test_a_job_that_is_gone_is_found_although_another_consumer_has_many_pending(
    connection: NatsPyConnection, name: str
) -> None:
    consumers = [
        {
            "name": consumer,
            "filter_subject": f"{name}.jobs.{consumer}",
            "max_deliver": 1,
            "ack_wait": "30s",
            "sample_freq": "0",
        }
        for consumer in ("busy", "quiet")
    ]
    queue = await make_queue(connection, name, consumers=consumers)
    cursor = await take_cursor(connection, queue)
    waiting_for = await publish_jobs(connection, queue, map(str, range(200)), kind="busy")
    jobs = await publish_jobs(connection, queue, "ab", kind="quiet")
    waiter = start_waiting(connection, cursor, [*waiting_for, jobs[0]])
    for message in await pull_jobs(connection, queue, 2, consumer="quiet"):
        await message.ack_sync()
    (report,) = await wait_reports([waiter])
    assert (report.unaccounted, len(report.awaited)) == ({jobs[0]}, 200)


async def test_a_death_without_an_entry_is_found(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, "abc")
    for message in await pull_jobs(connection, queue, 2):
        await message.nak()
    await wait_for_entries(connection, queue, 2)
    await connection.api(f"STREAM.PURGE.{name}-dead")
    waiter = start_waiting(connection, cursor, jobs, WaitPolicy(max_dead=1))
    (report,) = await wait_reports([waiter])
    assert (report.dead, report.unaccounted) == ({1: NO_ADVISORY, 2: NO_ADVISORY}, set())


async def test_advisories_that_are_due_while_no_worker_pulls_are_triggered(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, "ab")
    waiter = start_waiting(connection, cursor, jobs, ANY)
    # The worker crashes with the jobs in flight, and no other one starts.
    await pull_jobs(connection, queue, 2)
    assert await stored_count(connection, f"{name}-dead") == 0
    (report,) = await wait_reports([waiter])
    assert report.dead.keys() == set(jobs)
    assert set(report.dead.values()) <= {"1 deliveries to worker", NO_ADVISORY}


@pytest.mark.slow
async def test_a_death_whose_advisory_was_lost_with_a_killed_server_is_found(own_nats: NatsServer, name: str) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 5})) as connection:
        queue = await make_queue(connection, name)
        cursor = await take_cursor(connection, queue)
        jobs = await publish_jobs(connection, queue, map(str, range(50)))
        waiter = start_waiting(connection, cursor, jobs, ANY)
        # The dead letter queue captures nothing at the moment of their deaths.
        stream = (await connection.api(f"STREAM.INFO.{name}-dead"))["config"]
        await connection.api(f"STREAM.UPDATE.{name}-dead", stream | {"subjects": [f"{name}.nothing"]})
        for message in await pull_jobs(connection, queue, 50):
            await message.nak()
        own_nats.kill()
        await asyncio.to_thread(own_nats.restart)
        await eventually(lambda: connection.client.is_connected)
        # Deliveries that the crash undid are repeated.
        while undone := (await consumer_info(connection, name, CONSUMER))["num_pending"]:
            for message in await pull_jobs(connection, queue, undone):
                await message.nak()
        (report,) = await wait_reports([waiter], within=20)
        assert report.dead == dict.fromkeys(jobs, NO_ADVISORY)
        assert await stored_count(connection, f"{name}-dead") == 0


@pytest.mark.slow
async def test_jobs_in_flight_and_pending_jobs_stay_awaited(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 3})
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, map(str, range(6)))
    waiter = start_waiting(connection, cursor, jobs, ANY)
    messages = await pull_jobs(connection, queue, 4)
    await messages[0].nak()
    await messages[1].nak(delay=20)
    await messages[2].in_progress()
    await asyncio.sleep(2)
    assert waiter.remaining == []
    info = await consumer_info(connection, name, CONSUMER)
    assert (info["num_ack_pending"], info["num_pending"]) == (4, 2)
    await store_completions(connection, queue, jobs)
    assert (await wait_reports([waiter]))[0].completed == set(jobs)


@pytest.mark.slow
async def test_a_job_whose_completion_is_stored_is_not_unaccounted_however_long_reading_takes(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.COMPARISON_INTERVAL, 0.01)
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, map(str, range(20)))
    for message in await pull_jobs(connection, queue, 20):
        await message.ack_sync()
    # Many other completions have to be read before these.
    await store_completions(connection, queue, list(range(1_000, 9_000)))
    await store_completions(connection, queue, jobs)
    now = await take_cursor(connection, queue)
    holding = start_waiting(connection, now, [99])
    reports = await wait_reports([start_waiting(connection, cursor, [job]) for job in jobs])
    assert [report.unaccounted for report in reports] == [set()] * len(jobs)
    assert [report.completed for report in reports] == [{job} for job in jobs]
    holding.task.cancel()


async def test_a_late_completion_of_an_unaccounted_job_counts(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"sample_freq": "0"})
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, "ab")
    waiter = start_waiting(connection, cursor, jobs, ANY)
    (message,) = await pull_jobs(connection, queue, 1)
    await message.ack_sync()
    await eventually(lambda: waiter.remaining == [1])
    await store_completion(connection, queue, jobs[0])
    await eventually(lambda: waiter.remaining == [1, 1])
    await store_completion(connection, queue, jobs[1])
    (report,) = await wait_reports([waiter])
    assert (report.completed, report.unaccounted) == (set(jobs), set())
