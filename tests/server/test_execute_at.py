"""Jobs with the header X-Execute-At, published with bare nats-py as any program can."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import Job, cancel, connect, connection_settings
from airflow_provider_jetstream.jetstream.contract import copy_subject
from airflow_provider_jetstream.jetstream.errors import JobError
from airflow_provider_jetstream.worker import Delivery, Worker
from testbed.face import consumer_info, last_message, prepare_jobs
from testbed.queues import eventually, make_queue, publish_jobs, pull_jobs, running_worker, stored_count

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

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

        async def empty() -> bool:
            return not await stored_count(connection, name)

        await eventually(empty)
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
        list(prepare_jobs(jobs, subject=None, origin=None, batch="b", queue=queue))
    # Another queue may have its own use for the header.
    other = await make_queue(connection, f"{name}-other")
    assert list(prepare_jobs(jobs, subject=None, origin=None, batch="b", queue=other))
