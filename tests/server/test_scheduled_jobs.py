"""Scheduled jobs, which the server publishes: when, with which headers, and what a queue needs for them."""

from __future__ import annotations

from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol
from unittest.mock import PropertyMock
from uuid import uuid4
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pytest

from airflow_provider_jetstream.jetstream import (
    Job,
    Origin,
    PublishRefusedError,
    Selection,
    connect,
    connection_settings,
    discover_queue,
    find_dead_letters,
    provision,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.errors import ServerTooOldError
from testbed.face import prepare_jobs, publish_prepared, read_range
from testbed.queues import (
    eventually,
    exhaust_deliveries,
    make_queue,
    pull_jobs,
    running_mover,
    small_queue,
    stored_count,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pytest_mock import MockerFixture

    from airflow_provider_jetstream.jetstream import PublishReport, WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer


class _MakeQueue(Protocol):
    async def __call__(self, **fields: Any) -> WorkQueue: ...


@pytest.fixture
async def make_scheduling(connection: NatsPyConnection, name: str) -> AsyncIterator[_MakeQueue]:
    """Make the queue with schedules, and move its jobs that are due until the test ends."""
    async with AsyncExitStack() as movers:

        async def make(**fields: Any) -> WorkQueue:
            queue = await make_queue(connection, name, schedules=True, **fields)
            await movers.enter_async_context(running_mover(connection, queue))
            return queue

        yield make


async def _publish(
    connection: NatsPyConnection, queue: WorkQueue, *jobs: Job, origin: Origin | None = None
) -> PublishReport:
    subject = f"{queue.name}.jobs.a"
    prepared = prepare_jobs(jobs, subject=subject, origin=origin, batch=uuid4().hex, queue=queue)
    report = await publish_prepared(connection, prepared)
    report.raise_for_failures()
    return report


@pytest.mark.slow
async def test_scheduled_jobs_are_published_in_time_with_their_headers_and_their_schedules_removed(
    connection: NatsPyConnection, name: str, make_scheduling: _MakeQueue
) -> None:
    queue = await make_scheduling()
    origin = Origin("dag", "run", "task", 2)
    at = datetime.now(UTC) + timedelta(seconds=1)
    job = Job({"n": 1}, f"{name}.jobs.later", id="order-1", at=at, advisory="told", headers={"X": "y"})
    report = await _publish(connection, queue, job, Job(b"now"), Job(b"past", at=at - timedelta(days=1)), origin=origin)
    # Those of the schedules are of their own stream.
    assert (report.scheduled, report.stored, list(report.sequences)) == ({0, 2}, 3, [1, 1, 2])
    assert (report.stream, report.awaited_ranges()) == (name, [(1, 1)])
    assert sorted([message.data for message in await pull_jobs(connection, queue, 2)]) == [b"now", b"past"]
    (message,) = await pull_jobs(connection, queue, 1)
    assert (message.subject, message.data) == (f"{name}.jobs.later", b'{"n":1}')
    assert message.metadata.timestamp >= at
    headers = {key: value for key, value in (message.headers or {}).items() if not key.startswith("Nats-")}
    assert headers == {"X": "y", "Job-Id": "order-1", "Job-Advisory": "told", **origin.headers()}
    assert await stored_count(connection, name) == 3
    await eventually(lambda: _is_taken(connection, f"{name}-schedules"))


@pytest.mark.slow
async def test_publishing_a_scheduled_job_of_a_task_twice_makes_one_job(
    connection: NatsPyConnection, name: str, make_scheduling: _MakeQueue
) -> None:
    queue = await make_scheduling()
    origin = Origin("dag", "run", "task")
    for _ in range(3):
        report = await _publish(connection, queue, Job(b"once", id="a", delay="1s"), origin=origin)
    assert (report.duplicates, list(report.sequences)) == (1, [1])
    await pull_jobs(connection, queue, 1)
    with pytest.raises(TimeoutError):
        await pull_jobs(connection, queue, 1, within=1)


async def test_a_schedule_published_again_after_the_duplicate_window_replaces_the_first(
    connection: NatsPyConnection, name: str, make_scheduling: _MakeQueue
) -> None:
    queue = await make_scheduling(duplicate_window="100ms")
    origin = Origin("dag", "run", "task")

    async def stored_again() -> bool:
        job = Job(b"once", id="a", delay="2s")
        return (await _publish(connection, queue, job, origin=origin)).duplicates == 0

    await stored_again()
    await eventually(stored_again)
    assert await stored_count(connection, f"{name}-schedules") == 1


@pytest.mark.slow
@pytest.mark.since_server("2.14", "repeated schedules")
async def test_a_repeating_schedule_makes_jobs_until_a_later_schedule_replaces_it(
    connection: NatsPyConnection, name: str, make_scheduling: _MakeQueue
) -> None:
    queue = await make_scheduling()
    await _publish(connection, queue, Job(b"first", id="tick", every="1s"))
    for message in await pull_jobs(connection, queue, 2):
        assert (message.data, (message.headers or {})["Job-Id"]) == (b"first", "tick")
        await message.ack_sync()
    await _publish(connection, queue, Job(b"second", id="tick", every="*/1 * * * * *"))

    async def second_came() -> bool:
        (message,) = await pull_jobs(connection, queue, 1)
        await message.ack_sync()
        return message.data == b"second"

    await eventually(second_came)
    for message in await pull_jobs(connection, queue, 2):
        assert message.data == b"second"
        await message.ack_sync()
    await _publish(connection, queue, Job(b"third", id="tick", every="@yearly"))
    request = {"subjects_filter": f"scheduled.{name}.>"}
    schedules = (await connection.api(f"STREAM.INFO.{name}-schedules", request))["state"]
    assert sum(schedules["subjects"].values()) == 1


@pytest.mark.slow
async def test_schedules_outlive_a_kill_of_the_server(own_nats: NatsServer, name: str) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 5})) as connection:
        queue = await make_queue(connection, name, schedules=True)
        async with running_mover(connection, queue):
            await _publish(connection, queue, Job(b"later", delay="2s"))
            own_nats.kill()
            own_nats.restart()
            await eventually(lambda: connection.client.is_connected)
            (message,) = await pull_jobs(connection, queue, 1, within=15)
            assert message.data == b"later"


@pytest.mark.slow
async def test_a_scheduled_job_that_a_worker_terminates_is_redriven_from_its_archive_copy(
    connection: NatsPyConnection, name: str, make_scheduling: _MakeQueue
) -> None:
    queue = await make_scheduling()
    await _publish(connection, queue, Job(b"later", id="a", delay="200ms"), Job(b"never", delay="1d"))
    (message,) = await pull_jobs(connection, queue, 1)
    # By a worker that stores no body.
    await message.term()
    await eventually(lambda: _has_entry(connection, queue))
    (letter,) = (await find_dead_letters(connection, queue)).letters
    assert (letter.body, letter.subject, letter.job_id) == (b"later", f"{name}.jobs.a", "a")
    report = await redrive_dead_letters(connection, queue)
    assert list(report.redriven) == [letter.sequence]
    (message,) = await pull_jobs(connection, queue, 1)
    assert message.data == b"later"
    assert (message.headers or {})["Job-Id"] == "a"


async def _has_entry(connection: NatsPyConnection, queue: WorkQueue) -> bool:
    return bool((await find_dead_letters(connection, queue)).letters)


@pytest.mark.slow
async def test_a_schedule_is_no_dead_letter_and_its_job_may_become_one(
    connection: NatsPyConnection, name: str, make_scheduling: _MakeQueue
) -> None:
    queue = await make_scheduling()
    await _publish(connection, queue, Job(b"never", delay="1d"), Job(b"poison", id="p", delay="200ms"))

    async def came() -> bool:
        info = await connection.api(f"CONSUMER.INFO.{name}.worker")
        return bool(info["num_pending"])

    await eventually(came)
    await exhaust_deliveries(connection, queue, 1)
    findings = await find_dead_letters(connection, queue, Selection())
    assert [letter.body for letter in findings.letters] == [b"poison"]


@pytest.mark.slow
async def test_an_existing_queue_gets_schedules_and_keeps_them_when_the_flag_is_dropped(
    connection: NatsPyConnection, name: str
) -> None:
    await make_queue(connection, name)
    done = await provision(connection, small_queue(name, schedules=True))
    assert f"create stream {name}-schedules" in str(done)
    await _publish(connection, small_queue(name, schedules=True), Job(b"later", delay="1s"))
    assert (await provision(connection, small_queue(name))).changes == ()
    assert (await discover_queue(connection, name)).schedules is not None
    async with running_mover(connection, await discover_queue(connection, name)):
        assert (await pull_jobs(connection, small_queue(name), 1))[0].data == b"later"


async def _is_taken(connection: NatsPyConnection, schedules: str) -> bool:
    return await stored_count(connection, schedules) == 0


async def test_a_server_that_makes_no_jobs_of_schedules_gets_none(
    connection: NatsPyConnection, name: str, mocker: MockerFixture
) -> None:
    queue = await make_queue(connection, name, schedules=True)
    connection.api_level = 1
    mocker.patch.object(type(connection), "server_version", PropertyMock(return_value=(2, 11, 9)))
    with pytest.raises(ServerTooOldError, match=r"schedules of work queue .*: expected nats-server 2\.12\.0 or later"):
        await provision(connection, queue)
    with pytest.raises(PublishRefusedError, match=r"expected nats-server 2\.12 or later for '@at .*', found 2\.11\.9"):
        await _publish(connection, queue, Job(b"", delay="1h"))
    connection.api_level = 2
    with pytest.raises(PublishRefusedError, match=r"expected nats-server 2\.14 or later for '@every 30s'"):
        await _publish(connection, queue, Job(b"", id="a", every="30s"))
    assert await stored_count(connection, name) == 0


async def test_a_target_outside_the_queue_is_refused_by_the_server(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, schedules=True)
    with pytest.raises(PublishRefusedError, match="message schedules target is invalid"):
        await _publish(connection, queue, Job(b"", "elsewhere.a", delay="1h"))


@pytest.mark.slow
@pytest.mark.since_server("2.14", "repeated schedules")
async def test_a_cron_expression_is_evaluated_in_its_time_zone(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, schedules=True)
    # On no day of the year the same hour as in UTC, nor half an hour off it.
    zone, now = "Asia/Kathmandu", datetime.now(UTC)
    there = now.astimezone(ZoneInfo(zone))

    def each_second_of(moment: datetime) -> str:
        return f"* * {moment.hour},{(moment + timedelta(hours=1)).hour} * * *"

    await _publish(
        connection,
        queue,
        Job(b"there", id="there", every=each_second_of(there), time_zone=zone),
        Job(b"in UTC", id="in UTC", every=each_second_of(now)),
        Job(b"misread", id="misread", every=each_second_of(now), time_zone=zone),
        Job(b"unread", id="unread", every=each_second_of(there)),
    )
    next_times: dict[bytes, str] = {}

    async def came() -> bool:
        async for message in read_range(connection, f"{name}-schedules", f"due.{name}.>"):
            next_times[message.data] = message.header("Nats-Schedule-Next") or ""
        return len(next_times) >= 2

    await eventually(came)
    assert set(next_times) == {b"there", b"in UTC"}
    assert datetime.fromisoformat(next_times[b"there"]).utcoffset() == timedelta(hours=5, minutes=45)
    assert datetime.fromisoformat(next_times[b"in UTC"]).utcoffset() == timedelta()


@pytest.mark.since_server("2.14", "cron expressions")
async def test_a_time_zone_that_only_the_server_does_not_know_is_refused_by_it(
    connection: NatsPyConnection, name: str, mocker: MockerFixture
) -> None:
    queue = await make_queue(connection, name, schedules=True)
    # As on a machine without a time zone database.
    mocker.patch("zoneinfo.ZoneInfo", side_effect=ZoneInfoNotFoundError)
    mocker.patch("zoneinfo.available_timezones", return_value=set())
    with pytest.raises(PublishRefusedError, match="message schedules time zone is invalid"):
        await _publish(connection, queue, Job(b"", id="a", every="@daily", time_zone="Nowhere/City"))
