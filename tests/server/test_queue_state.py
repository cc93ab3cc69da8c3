"""The state of queues: truthful for consumers, partitions, priorities, subjects without a consumer, limits, pauses."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from test_command_line import as_json

from airflow_provider_jetstream.jetstream import provision, running_warnings
from airflow_provider_jetstream.jetstream.inspection import overview as overviews
from airflow_provider_jetstream.jetstream.inspection.queue_metrics import queue_samples
from airflow_provider_jetstream.jetstream.inspection.queue_state import QueueState, QueueWatch
from testbed.face import inspect_all_queues
from testbed.queues import (
    eventually,
    make_dead_letters,
    make_queue,
    publish_jobs,
    pull_jobs,
    small_queue,
    until_stored,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pytest_mock import MockerFixture

    from airflow_provider_jetstream.jetstream import WorkQueue
    from airflow_provider_jetstream.jetstream.inspection.queue_state import PartState
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer


async def look(connection: NatsPyConnection, name: str, watch: QueueWatch) -> dict[str, PartState]:
    """Return the states of a queue's parts by their names."""
    overview = next(found for found in await inspect_all_queues(connection) if found.name == name)
    return {found.name: found for found in watch.compare(overview)}


@asynccontextmanager
async def pulling(connection: NatsPyConnection, queue: str, consumer: str, *, ack: bool = True) -> AsyncIterator[None]:
    """Do jobs as a foreign worker does."""

    async def work() -> None:
        pull = await connection.client.jetstream().pull_subscribe_bind(consumer, stream=queue)
        while True:
            with suppress(TimeoutError):
                for message in await pull.fetch(1, timeout=5):
                    if ack:
                        await message.ack_sync()

    task = asyncio.create_task(work())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.slow
async def test_jobs_that_nobody_pulls_are_stuck_and_jobs_that_end_are_worked(
    connection: NatsPyConnection, name: str
) -> None:
    queue, watch = await make_queue(connection, name), QueueWatch()
    assert (await look(connection, name, watch))["worker"].state == QueueState.IDLE
    await publish_jobs(connection, queue, map(str, range(5)))
    first = (await look(connection, name, watch))["worker"]
    assert (first.state, first.pending, first.since) == (QueueState.STUCK, 5, None)
    assert first.evidence == "5 pending, 0 in flight, and nobody pulls"
    again = (await look(connection, name, watch))["worker"]
    assert again.since is not None
    assert watch.state == QueueState.STUCK
    async with pulling(connection, name, "worker"):

        async def works() -> bool:
            return (await look(connection, name, watch))["worker"].state in (QueueState.WORKING, QueueState.IDLE)

        await eventually(works, 30)


@pytest.mark.slow
async def test_a_partition_without_a_worker_is_unserved(connection: NatsPyConnection, name: str) -> None:
    queue = small_queue(
        name,
        subjects=[f"{name}.jobs.*"],
        consumers=[{"name": "part", "filter_subject": f"{name}.jobs.{{partition}}", "partitions": 2, "max_deliver": 3}],
    )
    await provision(connection, queue)
    watch = QueueWatch()
    async with pulling(connection, name, "part-0"):
        for partition in (0, 1):
            await publish_jobs(connection, queue, ["a", "b"], kind=str(partition))

        async def is_done() -> bool:
            states = await look(connection, name, watch)
            return states["part-0"].pending == 0 and states["part-1"].pending == 2

        await eventually(is_done, 30)
        unserved = (await look(connection, name, watch))["part-1"]
    assert unserved.state == watch.state == QueueState.UNSERVED
    assert unserved.evidence == "partition 1 of 2: 2 pending, 0 in flight, and nobody pulls, while part-0 is served"


async def test_jobs_of_low_priority_that_nobody_serves_are_unserved(connection: NatsPyConnection, name: str) -> None:
    consumers = [{"name": kind, "filter_subject": f"{name}.jobs.{kind}", "max_deliver": 3} for kind in ("high", "low")]
    queue, watch = (
        small_queue(name, consumers=consumers, subjects=[f"{name}.jobs.high", f"{name}.jobs.low"]),
        QueueWatch(),
    )
    await provision(connection, queue)
    async with pulling(connection, name, "high"):
        await publish_jobs(connection, queue, ["a"] * 3, kind="low")
        await publish_jobs(connection, queue, ["a"] * 3, kind="high")

        async def high_is_done() -> bool:
            states = await look(connection, name, watch)
            return states["high"].pending == 0 and watch.state == QueueState.UNSERVED

        await eventually(high_is_done, 30)
    assert watch.states[0].name == "low"


@pytest.mark.slow
async def test_jobs_that_no_consumer_takes_are_unserved_or_without_consumer(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"filter_subject": f"{name}.jobs.plain"})
    await publish_jobs(connection, queue, ["a", "b"], kind="other")
    watch = QueueWatch()
    states = await look(connection, name, watch)
    assert watch.state == states[f"{name}.jobs.other"].state == QueueState.UNSERVED
    assert states[f"{name}.jobs.other"].pending == 2
    await connection.api(f"CONSUMER.DELETE.{name}.worker", {})
    states = await look(connection, name, watch)
    assert watch.state == states[name].state == QueueState.NO_CONSUMER
    assert states[name].evidence == "2 jobs are stored, and the stream has no consumer"


@pytest.mark.parametrize("limit", ["max_msgs", "max_bytes"])
async def test_a_stream_at_a_limit_is_full(connection: NatsPyConnection, name: str, limit: str) -> None:
    most = 3 if limit == "max_msgs" else 400
    queue = small_queue(name, discard="new", **{limit: most})  # type: ignore[arg-type]
    await provision(connection, queue)
    jetstream = connection.client.jetstream()
    with suppress(Exception):
        for _ in range(10):
            await jetstream.publish(f"{name}.jobs.plain", b"x" * 50)
    watch = QueueWatch()
    full = next(state for state in (await look(connection, name, watch), watch.states)[1] if state.part == "queue")
    assert full.state == QueueState.FULL
    assert f"of {limit} {most} are used: the stream refuses more jobs" in full.evidence


@pytest.mark.since_server("2.11", "pauses of consumers")
async def test_a_paused_consumer_is_paused_until(connection: NatsPyConnection, name: str) -> None:
    await make_queue(connection, name, jobs=["a"])
    until = datetime.now(UTC) + timedelta(hours=1)
    await connection.api(f"CONSUMER.PAUSE.{name}.worker", {"pause_until": until.isoformat()})
    watch = QueueWatch()
    paused = (await look(connection, name, watch))["worker"]
    assert paused.state == watch.state == QueueState.PAUSED
    assert f"paused until {until:%Y-%m-%dT%H:%M}" in paused.evidence


@pytest.mark.slow
async def test_jobs_in_flight_of_which_none_ends_are_stuck_after_a_while(
    connection: NatsPyConnection, name: str
) -> None:
    queue, watch = await make_queue(connection, name, consumer={"ack_wait": "1s", "max_deliver": 100}), QueueWatch()
    await publish_jobs(connection, queue, ["a", "b"])
    await pull_jobs(connection, queue, 1)
    assert (await look(connection, name, watch))["worker"].state == QueueState.WAITING
    # What another watch has seen two minutes ago.
    known = {
        key: type(found)(found.state, found.since, None, found.quiet_since and found.quiet_since - timedelta(minutes=2))
        for key, found in watch.known().items()
    }
    later = QueueWatch()
    later.remember(known)
    stuck = (await look(connection, name, later))["worker"]
    assert stuck.state == QueueState.STUCK
    assert "none has ended for 2 min, with an ack wait of 1 s" in stuck.evidence


def test_the_most_urgent_state_is_that_of_the_queue() -> None:
    assert [state.value for state in QueueState] == [
        *("no_consumer", "stuck", "unserved", "full", "paused", "waiting", "working", "idle", "unknown")
    ]
    assert QueueWatch().state == QueueState.UNKNOWN


# Queues with thousands of subjects: monitoring counts their dead and undeliverable jobs, or says that it doesn't.


_METRICS = ("jetstream_queue_counted", "jetstream_queue_dead_letters", "jetstream_queue_undeliverable_jobs")


async def queue_of_many_subjects(
    connection: NatsPyConnection, name: str, *, waiting: int = 2_050, unmatched: int = 3
) -> WorkQueue:
    """A queue with three dead letters, and one job each on many subjects."""
    queue = await make_queue(
        connection, name, subjects=[f"{name}.jobs.>", f"{name}.other.*"], consumer={"filter_subject": f"{name}.jobs.>"}
    )
    await make_dead_letters(connection, queue, "abc")
    for number in range(waiting):
        await connection.client.publish(f"{name}.jobs.{number}", b"{}")
    for number in range(unmatched):
        await connection.client.publish(f"{name}.other.{number}", b"{}")
    await until_stored(connection, name, 3 + waiting + unmatched)
    return queue


async def metrics(connection: NatsPyConnection, name: str) -> dict[str, float]:
    (overview,) = [found for found in await inspect_all_queues(connection) if found.name == name]
    return {sample.metric: sample.value for sample in queue_samples(overview) if sample.metric in _METRICS}


@pytest.mark.slow
@pytest.mark.parametrize(("waiting", "unmatched"), [(2_050, 3), (0, 2_100), (2_050, 0)])
async def test_dead_and_undeliverable_jobs_are_counted_beyond_2000_subjects(
    nats: NatsServer, connection: NatsPyConnection, name: str, waiting: int, unmatched: int
) -> None:
    queue = await queue_of_many_subjects(connection, name, waiting=waiting, unmatched=unmatched)
    assert await metrics(connection, name) == dict(zip(_METRICS, (1, 3, unmatched), strict=True))
    (listed,) = [found for found in await as_json(nats, "queues") if found["queue"] == name]
    assert (listed["dead"], listed["undeliverable"], listed["problem"]) == (3, unmatched, None)
    names = {warning.name for warning in await running_warnings(connection, queue)}
    assert ("untaken-subjects" in names) == bool(unmatched)


async def test_beyond_the_bound_monitoring_says_that_it_does_not_count(
    connection: NatsPyConnection, name: str, mocker: MockerFixture
) -> None:
    # 250,000 subjects would take this test a minute.
    mocker.patch.object(overviews, "MAX_SUBJECTS", 5)
    await queue_of_many_subjects(connection, name, waiting=2, unmatched=2)
    assert await metrics(connection, name) == {"jetstream_queue_counted": 1, "jetstream_queue_dead_letters": 3} | {
        "jetstream_queue_undeliverable_jobs": 2
    }
    await connection.client.publish(f"{name}.jobs.one-more", b"{}")
    await connection.client.flush()
    assert await metrics(connection, name) == {"jetstream_queue_counted": 0}
    (overview,) = [found for found in await inspect_all_queues(connection) if found.name == name]
    assert "6 subjects, more than 5" in overview.uncounted
    assert "up to 5, aren't counted" in overview.uncounted
    found = QueueWatch().compare(overview)
    assert (QueueState.UNKNOWN, overview.uncounted) in [(part.state, part.evidence) for part in found]
    # A queue without anything left over needs no counting, however many subjects it has.
    await connection.api(f"STREAM.PURGE.{name}")
    for number in range(7):
        await connection.client.publish(f"{name}.jobs.{number}", b"{}")
    await connection.client.flush()
    assert await metrics(connection, name) == dict(zip(_METRICS, (1, 0, 0), strict=True))
