"""Whether jobs are about to end, so that a task stays on its slot: what workers have begun, and how long jobs take."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import WaitReport, connect, connection_settings, take_cursor
from airflow_provider_jetstream.jetstream.waiting.wait import while_ends_are_near
from testbed import seams
from testbed.nats_server import NatsServer
from testbed.queues import make_queue, publish_jobs, pull_jobs

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection

LOOKS = 5


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often, and for ever."""
    monkeypatch.setattr(seams.NEAR_ENDS_SHORTEST, 0.01)
    monkeypatch.setattr(seams.NEAR_ENDS_LONGEST, 3600.0)
    monkeypatch.setattr(seams.NEAR_ENDS_INTERVAL, 0.05)


async def stays(
    connection: NatsPyConnection, queue: WorkQueue, report: WaitReport, ended: frozenset[int] = frozenset()
) -> bool:
    """Return whether a wait goes on in place after several looks.

    :param ended: the jobs that end before the first one
    """
    cursor = await take_cursor(connection, queue)
    looks = 0
    looked = asyncio.Event()
    api = connection.api

    async def counting(subject: str, *arguments: object, **named: object) -> object:
        nonlocal looks
        looks += subject.startswith("CONSUMER.")
        report.awaited -= ended
        if looks >= LOOKS:
            looked.set()
        return await api(subject, *arguments, **named)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "api", counting)
        near = asyncio.create_task(while_ends_are_near(connection, cursor, report))
        many = asyncio.create_task(looked.wait())
        await asyncio.wait({near, many}, return_when=asyncio.FIRST_COMPLETED, timeout=30)
        near.cancel()
        many.cancel()
        outcomes = await asyncio.gather(near, many, return_exceptions=True)
    assert not isinstance(outcomes[0], Exception), outcomes
    return looked.is_set()


async def test_a_wait_stays_in_place_while_workers_have_all_jobs(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "1m"}, jobs="abc")
    await pull_jobs(connection, queue, 3)
    assert await stays(connection, queue, WaitReport({1, 2, 3}))


async def test_it_ends_where_nobody_has_begun_a_job(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, jobs="abc")
    assert not await stays(connection, queue, WaitReport({1, 2, 3}))


@pytest.mark.slow
@pytest.mark.parametrize(("ended", "near"), [(2, True), (1, False)])
async def test_it_goes_by_the_pace_where_some_jobs_have_ended(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, *, ended: int, near: bool
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "1m"})
    jobs = 4 if near else 1_000_000
    await publish_jobs(connection, queue, "abcd")
    await pull_jobs(connection, queue, 3)
    report = WaitReport(set(range(1, jobs + 1)))
    monkeypatch.setattr(seams.NEAR_ENDS_LONGEST, 60.0)
    assert await stays(connection, queue, report, frozenset(range(1, ended + 1))) is near


@pytest.mark.parametrize(("seconds", "near"), [(5, True), (7200, False)])
async def test_it_ends_where_jobs_of_the_queue_take_long(
    connection: NatsPyConnection, name: str, *, seconds: int, near: bool
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "1m", "sample_freq": "100%"}, jobs="abc")
    await pull_jobs(connection, queue, 3)
    metric = {
        "type": "io.nats.jetstream.metric.v1.consumer_ack",
        "timestamp": "2026-01-01T00:00:00Z",
        "stream": name,
        "consumer": "worker",
        "stream_seq": 1,
        "deliveries": 1,
        "ack_time": seconds * 10**9,
    }
    await connection.client.jetstream().publish(
        f"$JS.EVENT.METRIC.CONSUMER.ACK.{name}.worker", json.dumps(metric).encode()
    )
    assert await stays(connection, queue, WaitReport({2, 3})) is near


async def test_who_may_not_look_does_not_stay(name: str) -> None:
    config = """
    authorization { users = [
      {user: all, password: p}
      {user: some, password: p, permissions: {publish: {deny: "$JS.API.CONSUMER.>"}}}
    ] }
    """
    with NatsServer(config=config) as server:
        access = {"servers": (server.url,), "password": "p", "timeout": 5}
        async with connect(connection_settings({**access, "user": "all"})) as connection:
            queue = await make_queue(connection, name, jobs="a")
            cursor = await take_cursor(connection, queue)
        async with connect(connection_settings({**access, "user": "some"})) as connection, asyncio.timeout(30):
            await while_ends_are_near(connection, cursor, WaitReport({1}))
