"""Scheduled jobs, which the server publishes: when, with which headers, and what a queue needs for them."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta, timezone
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
    cancel,
    connect,
    connection_settings,
    discover_queue,
    find_dead_letters,
    provision,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.contract import copy_subject
from airflow_provider_jetstream.jetstream.errors import JobError, ServerTooOldError
from airflow_provider_jetstream.worker import Delivery, Worker
from testbed.dead_letters import stream_messages
from testbed.face import PreparedJobs, consumer_info, last_message, publish_prepared
from testbed.queues import (
    eventually,
    exhaust_deliveries,
    make_queue,
    publish_jobs,
    pull_jobs,
    running_mover,
    running_worker,
    small_queue,
    stored_count,
    until_stored,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pytest_mock import MockerFixture

    from airflow_provider_jetstream.jetstream import ConnectionSettings, PublishReport, WorkQueue
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
    prepared = PreparedJobs(jobs, subject=subject, origin=origin, batch=uuid4().hex, queue=queue)
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
    await until_stored(connection, f"{name}-schedules", 0)


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
        for message in await stream_messages(connection, f"{name}-schedules", f"due.{name}.>"):
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


# Jobs with the header X-Execute-At, published with bare nats-py as any program can.


HEADER = "X-Execute-At"


def text(time_: datetime) -> str:
    """Return a time as Go's RFC3339 layout has it, with whole seconds."""
    return time_.isoformat(timespec="seconds").replace("+00:00", "Z")


async def make_timed_queue(connection: NatsPyConnection, name: str, **consumer: Any) -> WorkQueue:
    return await make_queue(
        connection, name, consumer={"max_deliver": 3, "ack_wait": "30s"} | consumer, execute_at_header=True
    )


class Recorder:
    """A handler that records when each delivery started, by its body."""

    def __init__(self) -> None:
        self.started: list[tuple[str, int, datetime]] = []

    async def run(self, job: Delivery) -> None:
        self.started.append((job.body.decode(), job.attempt, datetime.now(UTC)))


@pytest.mark.slow
@pytest.mark.parametrize("consumer", [{}, {"ack_wait": None, "backoff": ["5s", "10s"]}], ids=["plain", "backoff"])
async def test_a_job_is_started_at_its_time_and_waiting_costs_one_delivery(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, consumer: dict[str, Any]
) -> None:
    queue = await make_timed_queue(connection, name, **consumer)
    due = (datetime.now(UTC) + timedelta(seconds=3)).replace(microsecond=0)
    handler = Recorder()
    # The same time in another zone.
    await publish_jobs(
        connection, queue, ["later"], headers={HEADER: text(due.astimezone(timezone(timedelta(hours=2))))}
    )
    await publish_jobs(connection, queue, ["past"], headers={HEADER: "2020-01-01t00:00:00z"})
    await publish_jobs(connection, queue, ["now"])
    async with running_worker(Worker(queue, "worker", handler.run, settings)):
        await eventually(lambda: len(handler.started) == 2, within=2)
        await eventually(lambda: len(handler.started) == 3)
    assert [(body, attempt) for body, attempt, _ in handler.started] == [("past", 1), ("now", 1), ("later", 2)]
    assert timedelta() <= handler.started[2][2] - due < timedelta(seconds=0.5)
    assert await stored_count(connection, f"{name}-dead") == 0


@pytest.mark.slow
async def test_a_job_that_is_due_within_a_moment_is_held_and_costs_no_delivery(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_timed_queue(connection, name)
    due = datetime.now(UTC) + timedelta(seconds=0.9)
    handler = Recorder()
    await publish_jobs(connection, queue, ["soon"], headers={HEADER: due.isoformat()})
    async with running_worker(Worker(queue, "worker", handler.run, settings)):
        await eventually(lambda: handler.started)
    assert [(body, attempt) for body, attempt, _ in handler.started] == [("soon", 1)]
    assert handler.started[0][2] >= due


@pytest.mark.slow
async def test_a_queue_that_does_not_declare_the_header_runs_its_jobs_at_once(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 1})
    handler = Recorder()
    await publish_jobs(connection, queue, ["job"], headers={HEADER: "2999-01-01T00:00:00Z"})
    async with running_worker(Worker(queue, "worker", handler.run, settings)):
        await eventually(lambda: handler.started, within=3)


@pytest.mark.slow
async def test_the_last_delivery_is_held_rather_than_made_a_dead_letter(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_timed_queue(connection, name, max_deliver=2)
    due = datetime.now(UTC) + timedelta(seconds=2.5)
    handler = Recorder()
    await publish_jobs(connection, queue, ["job"], headers={HEADER: due.isoformat()})
    # A foreign worker that knows the header and hands the job back.
    for message in await pull_jobs(connection, queue, 1):
        await message.nak()
    async with running_worker(Worker(queue, "worker", handler.run, settings)):
        await eventually(lambda: handler.started)
    assert [(body, attempt) for body, attempt, _ in handler.started] == [("job", 2)]
    assert handler.started[0][2] >= due
    assert await stored_count(connection, f"{name}-dead") == 0


async def test_a_worker_that_is_stopped_while_it_holds_the_last_delivery_stops_and_the_job_is_not_lost(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_timed_queue(connection, name, max_deliver=2)
    handler = Recorder()
    await publish_jobs(connection, queue, ["job"], headers={HEADER: "2999-01-01T00:00:00Z"})
    for message in await pull_jobs(connection, queue, 1):
        await message.nak()
    async with running_worker(Worker(queue, "worker", handler.run, settings, grace=0.1)):

        async def held() -> bool:
            return bool((await consumer_info(connection, name, "worker"))["delivered"]["consumer_seq"] == 2)

        await eventually(held)
    record = await last_message(connection, f"{name}-dead", copy_subject(name, "worker", 1))
    assert record is not None
    assert (record.data, handler.started) == (b"job", [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "value",
    [
        "tomorrow",
        "",
        "2026-11-22",
        "2026-11-22T10:00:00",
        "2026-02-30T10:00:00Z",
        "1795341600",
        "2026-11-22T10:00:00+0100",
        "\N{FULLWIDTH DIGIT TWO}026-11-22T10:00:00Z",
    ],
)
async def test_a_time_that_can_not_be_parsed_makes_a_dead_letter_with_the_reason(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, value: str
) -> None:
    queue = await make_timed_queue(connection, name)
    handler = Recorder()
    await publish_jobs(connection, queue, ["job"], headers={HEADER: value} if value else {HEADER: " "})
    letters = f"{name}-dead"
    async with running_worker(Worker(queue, "worker", handler.run, settings)):
        record = await eventually(lambda: last_message(connection, letters, copy_subject(name, "worker", 1)))
    assert record is not None
    assert (handler.started, record.data) == ([], b"job")
    assert f"header {HEADER}: expected a time such as" in str(record.header("Dead-Letter-Explanation"))


async def test_a_time_further_away_than_the_server_can_count_does_not_burn_deliveries(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_timed_queue(connection, name)
    handler = Recorder()
    await publish_jobs(connection, queue, ["never"], headers={HEADER: "9999-12-31T23:59:59Z"})
    async with running_worker(Worker(queue, "worker", handler.run, settings)):
        await asyncio.sleep(0.5)
        await publish_jobs(connection, queue, ["now"])
        await eventually(lambda: handler.started)
    info = await consumer_info(connection, name, "worker")
    assert (info["delivered"]["consumer_seq"], info["num_ack_pending"]) == (2, 1)


@pytest.mark.slow
async def test_a_job_that_waits_can_be_cancelled_and_is_settled_when_it_is_due(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_timed_queue(connection, name)
    due = datetime.now(UTC) + timedelta(seconds=2)
    handler = Recorder()
    await publish_jobs(connection, queue, ["job"], headers={HEADER: due.isoformat(), "Job-Id": "j"})
    async with running_worker(Worker(queue, "worker", handler.run, settings)):
        await eventually(lambda: delivered(connection, name))
        await cancel(connection, queue, "j")
        await until_stored(connection, name, 0)
    assert handler.started == []
    assert await stored_count(connection, f"{name}-dead") == 0


async def delivered(connection: NatsPyConnection, name: str) -> bool:
    return bool((await consumer_info(connection, name, "worker"))["delivered"]["consumer_seq"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "pause", "attempts"), [("stop", 0.3, {2}), ("kill", 0.0, {2, 3})], ids=["shut down", "killed at once"]
)
async def test_jobs_that_wait_are_started_at_their_time_also_after_a_restart_of_the_server(
    own_nats: NatsServer, end: str, pause: float, attempts: set[int]
) -> None:
    settings = connection_settings({"servers": (own_nats.url,)})
    async with connect(settings) as connection:
        # A nak that the killed server has forgotten costs the ack wait, and another delivery.
        queue = await make_timed_queue(connection, "timed", ack_wait="2s")
        due = (datetime.now(UTC) + timedelta(seconds=6)).replace(microsecond=0)
        await publish_jobs(connection, queue, map(str, range(20)), headers={HEADER: text(due)})
        handler = Recorder()
        async with running_worker(Worker(queue, "worker", handler.run, settings, concurrency=5)):

            async def all_wait() -> bool:
                info = await consumer_info(connection, "timed", "worker")
                return bool(info["delivered"]["consumer_seq"] >= 20)

            await eventually(all_wait)
            # The server writes the state of consumers down now and then.
            await asyncio.sleep(pause)
            getattr(own_nats, end)()
            own_nats.start()
            await eventually(lambda: len(handler.started) == 20, within=15)
        assert Counter(body for body, _, _ in handler.started) == Counter(map(str, range(20)))
        assert {attempt for _, attempt, _ in handler.started} <= attempts
        assert min(started for _, _, started in handler.started) >= due
        assert max(started for _, _, started in handler.started) < due + timedelta(seconds=3)
        assert await stored_count(connection, "timed-dead") == 0


@pytest.mark.parametrize("value", ["tomorrow", "2026-11-22T10:00:00"])
async def test_publishing_refuses_a_time_that_workers_could_not_parse(
    connection: NatsPyConnection, name: str, value: str
) -> None:
    queue = await make_timed_queue(connection, name)
    jobs = [Job("job", f"{name}.jobs.a", headers={HEADER: value})]
    with pytest.raises(JobError, match=f"job 0, header {HEADER}: expected a time such as"):
        list(PreparedJobs(jobs, subject=None, origin=None, batch="b", queue=queue))
    # Another queue may have its own use for the header.
    other = await make_queue(connection, f"{name}-other")
    assert list(PreparedJobs(jobs, subject=None, origin=None, batch="b", queue=other))
