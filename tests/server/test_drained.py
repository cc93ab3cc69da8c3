"""A queue is drained only when none of its jobs is left to be done, whatever a single inspection finds."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import RedriveRequest, check_drained, inspect_queue, redrive_dead_letters
from airflow_provider_jetstream.jetstream.errors import NotFoundError, QueueDeclarationError
from testbed import seams
from testbed.dead_letters import make_terminated_letters
from testbed.face import consumer_info, summarise_dead_letters
from testbed.queues import (
    CONSUMER,
    eventually,
    make_queue,
    probe,
    process_all,
    publish_jobs,
    pull_jobs,
    running_mover,
    small_queue,
    stored_count,
    until_stored,
)

if TYPE_CHECKING:
    from pytest_mock import MockerFixture

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection

LONG = {"max_deliver": 3, "ack_wait": "30s"}


async def drained(connection: NatsPyConnection, queue: WorkQueue, *, nothing_dead: bool = False) -> bool:
    return (await check_drained(connection, queue, nothing_dead=nothing_dead)).drained


async def two_kinds(connection: NatsPyConnection, name: str) -> WorkQueue:
    """Make a queue with a consumer each for two kinds of jobs, and a third kind that matches no consumer."""
    consumers = [
        {"name": kind, "filter_subject": f"{name}.jobs.{kind}", "max_deliver": 1, "ack_wait": "30s"} for kind in "ab"
    ]
    return await make_queue(connection, name, consumers=consumers)


@pytest.mark.slow
async def test_a_queue_is_drained_when_its_last_job_has_ended(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer=LONG)
    assert await drained(connection, queue)
    await publish_jobs(connection, queue, "ab")
    waiting = await check_drained(connection, queue)
    assert str(waiting) == f"{name} is not drained: worker: 2 pending, 0 in flight"
    # As a function of @task.sensor returns it, and as an if asks it.
    assert bool(waiting) is False
    first, second = await pull_jobs(connection, queue, 2)
    assert str(await check_drained(connection, queue)) == f"{name} is not drained: worker: 0 pending, 2 in flight"
    await first.ack_sync()
    assert not await drained(connection, queue)
    await second.ack_sync()
    report = await check_drained(connection, queue)
    assert str(report) == f"{name} is drained"
    assert bool(report) is True
    assert report.as_json() == {
        "queue": name,
        "drained": True,
        "consumers": [CONSUMER],
        "stored": 0,
        "pending": 0,
        "in_flight": 0,
        "undeliverable": 0,
        "undeliverable_subjects": {},
        "schedules": 0,
        "due": 0,
        "dead_in_queue": 0,
        "dead_letters": None,
        "uncertain": 0,
        "risks": [],
    }


@pytest.mark.slow
async def test_a_job_that_was_nacked_with_a_delay_is_in_flight(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer=LONG, jobs="a")
    (job,) = await pull_jobs(connection, queue, 1)
    await job.nak(delay=2)
    until = time.monotonic() + 1
    while time.monotonic() < until:
        assert not await drained(connection, queue)
    assert await process_all(connection, queue) == {"a": 1}
    assert await drained(connection, queue)


async def test_a_paused_consumer_with_jobs_is_not_drained(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer=LONG)
    until = (datetime.now(UTC) + timedelta(minutes=1)).isoformat()
    await connection.api(f"CONSUMER.PAUSE.{name}.{CONSUMER}", {"pause_until": until})
    assert await drained(connection, queue)
    await publish_jobs(connection, queue, "a")
    report = await check_drained(connection, queue)
    assert str(report) == f"{name} is not drained: worker: 1 pending, 0 in flight, paused"


@pytest.mark.slow
async def test_deaths_after_the_last_worker_was_gone_do_not_stay_in_flight(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 2, "ack_wait": "1s"}, jobs="abc")
    await pull_jobs(connection, queue, 3)
    await pull_jobs(connection, queue, 3)
    await asyncio.sleep(1.2)
    assert (await consumer_info(connection, name, CONSUMER))["num_ack_pending"] == 3

    async def over() -> bool:
        return await drained(connection, queue)

    await eventually(over)
    report = await check_drained(connection, queue)
    assert (report.stored, report.dead_in_queue, report.dead_letters) == (3, 3, None)
    assert str(report) == f"{name} is drained: 3 dead letters in the queue"


@pytest.mark.slow
async def test_a_job_that_has_deliveries_left_is_awaited_without_a_worker_too(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 2, "ack_wait": "300ms"}, jobs="a")
    await pull_jobs(connection, queue, 1)
    await asyncio.sleep(0.6)
    for _ in range(3):
        assert not await drained(connection, queue)
    assert await process_all(connection, queue) == {"a": 1}
    assert await drained(connection, queue)


@pytest.mark.slow
async def test_dead_letters_count_only_with_nothing_dead(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead=["used up"])
    await make_terminated_letters(connection, queue, ["terminated"])
    assert await drained(connection, queue)
    report = await check_drained(connection, queue, nothing_dead=True)
    assert (report.drained, report.dead_letters, report.dead_in_queue, report.uncertain) == (False, 2, 1, 0)
    assert str(report) == f"{name} is not drained: 2 dead letters"
    await redrive_dead_letters(connection, queue)
    # They are jobs again.
    assert not await drained(connection, queue)
    assert sum((await process_all(connection, queue)).values()) == 2
    report = await check_drained(connection, queue, nothing_dead=True)
    assert (report.drained, report.dead_letters, report.stored) == (True, 0, 0)


@pytest.mark.slow
async def test_parked_letters_do_not_count(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead="ab")
    assert not await drained(connection, queue, nothing_dead=True)
    await redrive_dead_letters(connection, queue, RedriveRequest(max_redrives=0))
    assert await drained(connection, queue, nothing_dead=True)


@pytest.mark.slow
async def test_undeliverable_jobs_are_awaited_and_named(connection: NatsPyConnection, name: str) -> None:
    queue = await two_kinds(connection, name)
    for kind in "cdd":
        await publish_jobs(connection, queue, ["job"], kind=kind)
    report = await check_drained(connection, queue)
    assert not report.drained
    named = f"{name}.jobs.d: 2; {name}.jobs.c: 1"
    assert str(report) == f"{name} is not drained: 3 jobs that no consumer takes ({named})"
    assert report.as_json()["undeliverable_subjects"] == {f"{name}.jobs.d": 2, f"{name}.jobs.c": 1}
    # A check of named consumers doesn't include these.
    assert (await check_drained(connection, queue, "a")).drained


async def test_the_largest_of_many_subjects_are_named(connection: NatsPyConnection, name: str) -> None:
    queue = await two_kinds(connection, name)
    for number in range(1_200):
        await connection.client.publish(f"{name}.jobs.c.{number}", b"job")
    await publish_jobs(connection, queue, ["job", "job"], kind="c.7")
    report = await check_drained(connection, queue)
    as_json = report.as_json()
    assert (as_json["drained"], as_json["undeliverable"]) == (False, 1_202)
    assert next(iter(as_json["undeliverable_subjects"].items())) == (f"{name}.jobs.c.7", 3)
    assert len(as_json["undeliverable_subjects"]) == 10
    assert str(report).endswith("; 1190 more)")


@pytest.mark.slow
async def test_scheduled_jobs_do_not_count(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer=LONG, schedules=True)
    at = (datetime.now(UTC) + timedelta(seconds=3)).isoformat().replace("+00:00", "Z")
    headers = {"Nats-Schedule": f"@at {at}", "Nats-Schedule-Target": f"due.{name}.{name}.jobs.later"}
    await connection.client.jetstream().publish(f"scheduled.{name}.once.a.b", b"job", headers=headers)
    report = await check_drained(connection, queue)
    assert (report.drained, report.schedules, report.dead_in_queue) == (True, 1, 0)
    assert str(report) == f"{name} is drained: 1 jobs for later"

    async def due() -> bool:
        return (await check_drained(connection, queue)).due == 1

    await eventually(due)
    assert (
        str(await check_drained(connection, queue, "worker")) == f"{name} is not drained: 1 scheduled jobs that are due"
    )
    async with running_mover(connection, queue):
        await eventually(lambda: _is_pending(connection, name))
    assert not await drained(connection, queue)


async def _is_pending(connection: NatsPyConnection, name: str) -> bool:
    return (await inspect_queue(connection, name)).pending == 1


@pytest.mark.slow
async def test_only_the_consumers_that_are_named_count(connection: NatsPyConnection, name: str) -> None:
    queue = await two_kinds(connection, name)
    await publish_jobs(connection, queue, ["job"], kind="b")
    assert (await check_drained(connection, queue, ["a"])).drained
    assert not (await check_drained(connection, queue, ["a", "b", "a"])).drained
    assert not await drained(connection, queue)
    (job,) = await pull_jobs(connection, queue, 1, consumer="b")
    await job.term()
    await until_stored(connection, f"{name}-dead", 1)
    theirs = await check_drained(connection, queue, ["a"], nothing_dead=True)
    assert (theirs.drained, theirs.dead_letters) == (True, 0)
    others = await check_drained(connection, queue, ["b"], nothing_dead=True)
    assert (others.drained, others.dead_letters) == (False, 1)


@pytest.mark.slow
async def test_uncertain_dead_letters_of_busy_consumers_do_not_count_for_others(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await two_kinds(connection, name)
    await publish_jobs(connection, queue, ["dead", "working"], kind="b")
    for job in (await pull_jobs(connection, queue, 2, consumer="b"))[:1]:
        await job.nak()

    async def is_stored() -> bool:
        await probe(connection, queue, consumer="b")
        return await stored_count(connection, f"{name}-dead") == 1

    await eventually(is_stored)
    await connection.api(f"STREAM.PURGE.{name}-dead")
    assert (await summarise_dead_letters(connection, queue)).uncertain == 1
    report = await check_drained(connection, queue, ["a"], nothing_dead=True)
    assert (report.drained, report.dead_letters, report.uncertain) == (True, 0, 0)


async def test_uncertain_dead_letters_prevent_draining(
    connection: NatsPyConnection, name: str, mocker: MockerFixture
) -> None:
    queue = await make_queue(connection, name)
    # Jobs that come and go during the count can have this effect, for too short a time for a test.
    summary = await summarise_dead_letters(connection, queue, group_by=("consumer",))
    summary.uncertain = 1
    mocker.patch(seams.DRAINED_SUMMARISE_DEAD_LETTERS, return_value=summary)
    report = await check_drained(connection, queue, nothing_dead=True)
    assert str(report) == f"{name} is not drained: 1 jobs that may be dead"


@pytest.mark.parametrize("names", [[], "", ["a", " "]])
async def test_empty_consumer_names_are_refused(
    connection: NatsPyConnection, name: str, names: list[str] | str
) -> None:
    with pytest.raises(NotFoundError, match=r"expected names of consumers to inspect, found .*: name some, or leave"):
        await check_drained(connection, small_queue(name), names)


async def test_a_missing_queue_or_consumer_is_named(connection: NatsPyConnection, name: str) -> None:
    with pytest.raises(NotFoundError, match=f"expected stream {name} on the server, found none"):
        await check_drained(connection, small_queue(name, dead_letters=None))
    queue = await two_kinds(connection, name)
    with pytest.raises(NotFoundError, match=f"expected consumer c of stream {name} on the server, found a, b: check"):
        await check_drained(connection, queue, ["a", "c"])
    await publish_jobs(connection, queue, ["job"], kind="a")
    await connection.api(f"STREAM.DELETE.{name}-dead")
    # At once, not after all jobs are done.
    with pytest.raises(NotFoundError, match=f"expected stream {name}-dead on the server, found none"):
        await check_drained(connection, queue, nothing_dead=True)
    with pytest.raises(QueueDeclarationError, match="expected dead_letters, which the scan reads"):
        await check_drained(connection, small_queue(name, dead_letters=None), nothing_dead=True)


@pytest.mark.slow
async def test_a_queue_is_not_drained_between_a_job_and_the_one_that_follows_from_it(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=LONG)
    hops, empty = 25, 0

    async def watch() -> None:
        nonlocal empty
        while not working.done():
            health = await inspect_queue(connection, name)
            empty += not health.pending and not health.in_flight
            await asyncio.sleep(0.02)

    async def relay() -> None:
        # The worst kind of worker: it acknowledges first and publishes the following job later.
        for _ in range(hops):
            (job,) = await pull_jobs(connection, queue, 1)
            await job.ack_sync()
            await asyncio.sleep(seams.current(seams.DRAINED_PAUSE) * 0.4)
            await publish_jobs(connection, queue, ["next"])
        (last,) = await pull_jobs(connection, queue, 1)
        await last.ack_sync()

    await publish_jobs(connection, queue, ["first"])
    working, texts = asyncio.create_task(relay()), set()
    watching = asyncio.create_task(watch())
    while not (report := await check_drained(connection, queue)).drained:
        texts.add(str(report))
    assert working.done()
    await watching
    assert (await inspect_queue(connection, name)).last_sequence == hops + 1
    # A single inspection would have been wrong, and so would two that ignore the stream's last sequence.
    assert empty > hops
    assert f"{name} is not drained: jobs came and went between two inspections" in texts


async def test_an_inspection_uses_up_no_delivery(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 3, "ack_wait": "300ms"}, jobs="a")
    await pull_jobs(connection, queue, 1)
    await asyncio.sleep(0.5)
    for _ in range(20):
        assert not await drained(connection, queue)
    (job,) = await pull_jobs(connection, queue, 1)
    assert job.metadata.num_delivered == 2
    await job.ack_sync()
    assert await drained(connection, queue)
