"""Cancelling jobs by their ids: what is stored, how workers receive it, and how a wait for such jobs ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from airflow_provider_jetstream.jetstream import (
    Job,
    Origin,
    WaitPolicy,
    cancel,
    find_dead_letters,
    get_message,
    take_cursor,
    wait,
)
from airflow_provider_jetstream.jetstream.errors import NotFoundError, QueueDeclarationError
from testbed.dead_letters import stream_messages
from testbed.face import PreparedJobs, consumer_info, find_cancellation, publish_prepared
from testbed.queues import (
    eventually,
    make_dead_letters,
    make_queue,
    publish_jobs,
    pull_jobs,
    running_mover,
    small_queue,
    store_completion,
    stored_count,
    stored_nanoseconds,
)

if TYPE_CHECKING:
    from datetime import datetime

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream import WaitReport, WorkQueue
    from testbed.face import NatsPyConnection


CANCELLED = "io.airflow.jetstream.v1.cancelled"


async def _stored_at(connection: NatsPyConnection, queue: WorkQueue, sequence: int) -> datetime:
    message = await get_message(connection, queue.name, sequence)
    assert message is not None
    return message.stored_at


async def _store_cancelled_end(
    connection: NatsPyConnection, queue: WorkQueue, message: Msg, why: str | None = None, by: str | None = None
) -> int:
    """Store the end of a cancelled job as a worker does."""
    sequence, stored = message.metadata.sequence.stream, stored_nanoseconds(message)
    return await store_completion(
        connection, queue, sequence, stored_nanoseconds=stored, type=CANCELLED, worker="w1", why=why, by=by
    )


async def _publish_scheduled(connection: NatsPyConnection, queue: WorkQueue, *jobs: Job) -> None:
    subject = f"{queue.name}.jobs.a"
    for job in jobs:
        # Each by a run of its own: ids are unique among the jobs of one.
        origin = Origin("shop", uuid4().hex, "send")
        prepared = PreparedJobs([job], subject=subject, origin=origin, batch="", queue=queue)
        (await publish_prepared(connection, prepared)).raise_for_failures()


@pytest.mark.parametrize("job_id", ["order-16", "a b.*.>", "日本\r\n", "/" * 5_000, "$JS.API", ""])
async def test_a_job_of_any_id_can_be_cancelled(connection: NatsPyConnection, name: str, job_id: str) -> None:
    queue = await make_queue(connection, name)
    (before,) = await publish_jobs(connection, queue, ["before"])
    assert not await find_cancellation(connection, queue, job_id)
    report = await cancel(connection, queue, job_id, "wrong price", "ann")
    (after,) = await publish_jobs(connection, queue, ["after"])
    cancellation = await find_cancellation(connection, queue, job_id)
    assert cancellation == report.cancellation
    assert (cancellation.job_id, cancellation.why, cancellation.by, report.schedules) == (
        job_id,
        "wrong price",
        "ann",
        0,
    )
    assert await find_cancellation(connection, queue, job_id, await _stored_at(connection, queue, before))
    assert not await find_cancellation(connection, queue, job_id, await _stored_at(connection, queue, after))
    assert not await find_cancellation(connection, queue, job_id + "x")
    await cancel(connection, queue, job_id)
    assert await find_cancellation(connection, queue, job_id, await _stored_at(connection, queue, after))


@pytest.mark.slow
@pytest.mark.parametrize("deny_delete", [False, True])
async def test_schedules_of_the_job_are_removed_and_others_stay(
    connection: NatsPyConnection, name: str, *, deny_delete: bool
) -> None:
    queue = await make_queue(connection, name, schedules=True, deny_delete=deny_delete)
    async with running_mover(connection, queue):
        await _publish_scheduled(
            connection,
            queue,
            Job(b"first", id="a", delay="1s"),
            Job(b"second", id="a", delay="1s"),
            Job(b"again", id="a", delay="1s"),
            Job(b"other", id="b", delay="1s"),
        )
        assert (await cancel(connection, queue, "a")).schedules == 3
        assert [message.data for message in await pull_jobs(connection, queue, 1)] == [b"other"]
        with pytest.raises(TimeoutError):
            await pull_jobs(connection, queue, 1, within=1.5)
        assert (await cancel(connection, queue, "a")).schedules == 0
        await _publish_scheduled(connection, queue, Job(b"anew", id="a", delay="1s"))
        (message,) = await pull_jobs(connection, queue, 1)
        assert message.data == b"anew"
        assert not await find_cancellation(connection, queue, "a", message.metadata.timestamp)


@pytest.mark.slow
async def test_jobs_that_are_due_and_not_moved_yet_are_removed(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, schedules=True)
    ids = ["a", "a", "b", None]
    jobs = [Job(b"%d" % place, id=own, delay="100ms") for place, own in enumerate(ids)]
    await _publish_scheduled(connection, queue, *jobs)
    await eventually(lambda: _are_due(connection, name, 4))
    assert (await cancel(connection, queue, "a")).schedules == 2
    async with running_mover(connection, queue):
        assert {message.data for message in await pull_jobs(connection, queue, 2)} == {b"2", b"3"}
        with pytest.raises(TimeoutError):
            await pull_jobs(connection, queue, 1, within=0.5)


async def _are_due(connection: NatsPyConnection, name: str, count: int) -> bool:
    found = await stream_messages(connection, f"{name}-schedules", f"due.{name}.>")
    return len(found) == count


@pytest.mark.slow
async def test_a_job_that_a_mover_has_in_its_hands_when_it_is_cancelled_does_not_run(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, schedules=True, max_msgs=1, discard="new", jobs=["in the way"])
    async with running_mover(connection, queue):
        await _publish_scheduled(connection, queue, Job(b"held", id="a", delay="100ms"), Job(b"other", delay="100ms"))

        async def held() -> bool:
            return int((await consumer_info(connection, f"{name}-schedules", "mover"))["num_ack_pending"]) == 2

        await eventually(held)
        await cancel(connection, queue, "a")
        seen = []
        for _ in range(2):
            (message,) = await pull_jobs(connection, queue, 1)
            seen.append(message.data)
            await message.ack_sync()
        assert seen == [b"in the way", b"other"]
        with pytest.raises(TimeoutError):
            await pull_jobs(connection, queue, 1, within=2)


@pytest.mark.slow
async def test_a_job_that_a_schedule_made_before_the_cancellation_is_cancelled_too(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, schedules=True)
    async with running_mover(connection, queue):
        await _publish_scheduled(connection, queue, *[Job(b"%d" % place, id="a", delay="100ms") for place in range(3)])

        async def made() -> int:
            info = await connection.api(f"CONSUMER.INFO.{name}.worker")
            return int(info["num_pending"])

        await eventually(made)
        await cancel(connection, queue, "a")
        for message in await pull_jobs(connection, queue, await made()):
            assert await find_cancellation(connection, queue, "a", message.metadata.timestamp)


async def test_a_cancelled_job_ends_the_wait_and_is_counted_apart(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    sequences = await publish_jobs(connection, queue, "ab")
    waiting = asyncio.create_task(wait(connection, cursor, sequences, policy=WaitPolicy(max_cancelled=1)))
    await cancel(connection, queue, "job-1", "wrong price", "ann")
    message, other = await pull_jobs(connection, queue, 2)
    await _store_cancelled_end(connection, queue, message, "wrong price", "ann")
    await message.ack_sync()
    await store_completion(connection, queue, other.metadata.sequence.stream)
    async with asyncio.timeout(10):
        report = await waiting
    assert (report.completed, report.cancelled, report.dead) == ({2}, {1: "ann: wrong price"}, {})
    assert report.as_json() == {
        "awaited": 0,
        "completed": 1,
        "dead": 0,
        "completed_sequences": [(2, 2)],
        "dead_sequences": [],
        "dead_reasons": {},
        "cancelled": 1,
        "cancelled_sequences": [(1, 1)],
        "cancelled_reasons": {1: "ann: wrong price"},
        "unaccounted": 0,
        "unaccounted_sequences": [],
        "results": {},
        "results_left_out": 0,
        "details": {
            "awaited": [],
            "with_result": [],
            "copies": [],
            "attempts": [],
            "notes": [("ann: wrong price", [(1, 1)])],
        },
    }


@pytest.mark.parametrize(("max_cancelled", "ended"), [(0, 1), (1, 2), (2, 3), (None, 3)])
async def test_the_policy_accepts_cancelled_jobs_up_to_its_limit(
    connection: NatsPyConnection, name: str, max_cancelled: int | None, ended: int
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    sequences = await publish_jobs(connection, queue, "abc")
    for message in await pull_jobs(connection, queue, 3):
        await _store_cancelled_end(connection, queue, message)
    async with asyncio.timeout(10):
        report = await wait(connection, cursor, sequences, policy=WaitPolicy(max_cancelled=max_cancelled))
    assert report.cancelled == dict.fromkeys(range(1, ended + 1), "no reason given")
    assert len(report.awaited) == 3 - ended


async def test_of_several_ends_of_one_job_the_first_counts(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    (sequence,) = await publish_jobs(connection, queue, "a")
    (message,) = await pull_jobs(connection, queue, 1)
    stored = [await _store_cancelled_end(connection, queue, message) for _ in range(2)]
    # The second one is a duplicate of the first.
    assert stored[0] == stored[1]
    # From a worker in another language, whose completions have other ids.
    await store_completion(connection, queue, sequence)
    report = await wait(connection, cursor, [sequence], policy=WaitPolicy(max_cancelled=None))
    assert (report.completed, list(report.cancelled)) == (set(), [1])


async def test_a_cancelled_job_that_was_not_acknowledged_is_no_dead_letter(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    cursor = (await take_cursor(connection, queue)).from_start()
    (sequence,) = await make_dead_letters(connection, queue, ["slow"])
    message = await get_message(connection, name, sequence)
    assert message is not None
    assert len((await find_dead_letters(connection, queue)).letters) == 1
    stored = int(message.stored_at.timestamp() * 1_000_000_000)
    await store_completion(connection, queue, sequence, stored_nanoseconds=stored, type=CANCELLED, why="late")
    assert (await find_dead_letters(connection, queue)).letters == ()
    report: WaitReport = await wait(connection, cursor, [sequence], policy=WaitPolicy(max_cancelled=None))
    assert (report.cancelled, report.dead) == ({1: "late"}, {})


@pytest.mark.parametrize("declared", [False, True])
async def test_a_queue_whose_events_capture_no_cancellations_is_refused_with_what_to_declare(
    connection: NatsPyConnection, name: str, *, declared: bool
) -> None:
    events = {"name": f"{name}-events", "subjects": [f"completed.{name}.>"]} if declared else None
    queue = small_queue(name, events=events)
    with pytest.raises(QueueDeclarationError, match=rf"expected events that capture cancelled\.{name}\.>, so that"):
        await cancel(connection, queue, "a")
    if declared:
        assert f"{name}-events doesn't capture cancelled.{name}.>: jobs can't be cancelled" in queue.warnings()


async def test_events_provisioned_by_a_version_without_cancellations_are_upgraded(
    connection: NatsPyConnection, name: str
) -> None:
    old = {"name": f"{name}-events", "subjects": [f"completed.{name}.>"]}
    await make_queue(connection, name, events=old)
    with pytest.raises(NotFoundError, match=rf"to capture cancelled\.{name}\.>, found completed\.{name}\.>: provision"):
        await cancel(connection, small_queue(name), "a")
    queue = await make_queue(connection, name)
    await cancel(connection, queue, "a")
    assert await stored_count(connection, f"{name}-events") == 1
