"""Jobs are published here and awaited there, by a handle."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Job,
    JobsHandle,
    Origin,
    PublishReport,
    WaitPolicy,
    connect,
    provision,
    publish,
    publish_with_handle,
    take_cursor,
    wait_by_handle,
)
from airflow_provider_jetstream.jetstream.errors import ArgumentError, DeadlineError, JobsDeadError, QueueGoneError
from testbed import seams
from testbed.dead_letters import stream_messages
from testbed.queues import exhaust_deliveries, make_queue, publish_jobs, store_completion
from testbed.waiters import store_completions

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from testbed.face import NatsPyConnection

LONG = 30.0
CURSOR = {
    "queue": "q",
    "created": "2026-01-01T00:00:00Z",
    "events": "e",
    "events_from": 1,
    "dead_letters": None,
    "dead_letters_from": 1,
}


async def published(connection: NatsPyConnection, queue: WorkQueue, count: int) -> dict[str, Any]:
    """Publish jobs with ids, and return their handle as an XCom holds it."""
    jobs = [Job(str(number), f"{queue.name}.jobs.x", id=f"{queue.name}-{number}") for number in range(count)]
    report = await publish_with_handle(connection, queue, jobs)
    handle: dict[str, Any] = json.loads(json.dumps(report.handle))
    return handle


async def test_the_jobs_of_a_handle_are_awaited_over_another_connection(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, jobs=["of somebody else"])
    handle = await published(connection, queue, 3)
    assert handle["sequences"] == [[2, 4]]
    await publish_jobs(connection, queue, ["of somebody else"])
    for sequence in (2, 3, 4):
        await store_completion(connection, queue, sequence, result=sequence)
    async with connect(settings) as other:
        for value in (handle, {"published": 3, "handle": handle}, json.dumps(handle), str({"handle": handle})):
            report = await wait_by_handle(other, value, time_limit=LONG)
            assert (report.completed, report.awaited) == ({2, 3, 4}, set())
            assert report.results == {"2": 2, "3": 3, "4": 4}


@pytest.mark.slow
async def test_a_handle_stays_small_where_the_sequences_of_its_jobs_are_scattered(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    sequences = list(range(1, 200_000, 2))
    report = PublishReport()
    report.sequences.extend(sequences)
    report.advised = {f"digest-{number:015}": number for number in sequences[:500]}
    report.handle = (await JobsHandle.take(connection, cursor, report, "key")).as_json()
    assert report.handle is not None
    assert len(json.dumps(report.handle)) < 2_000
    found, advised = await JobsHandle.of(report.handle).report(connection)
    assert found.awaited == set(sequences)
    assert advised == report.advised
    await connection.api(f"STREAM.PURGE.{name}-events")
    with pytest.raises(QueueGoneError, match="isn't stored any more: wait before the events' max_age is over"):
        await JobsHandle.of(report.handle).report(connection)


async def test_jobs_that_ended_before_a_retry_published_them_again_have_ended(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    assert await published(connection, queue, 2)
    await store_completions(connection, queue, [1, 2])
    jobs = [Job(str(number), f"{name}.jobs.x", id=f"{name}-{number}") for number in range(2)]
    first = await publish(connection, queue, jobs)
    again = replace(first, duplicates=2, handle=None)
    again.handle = (await JobsHandle.take(connection, await take_cursor(connection, queue), again, "key")).as_json()
    handle = JobsHandle.of(again)
    assert handle.cursor.events_from == 1


async def test_the_wait_for_a_handle_of_a_queue_that_was_created_anew_fails(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.COMPARISON_INTERVAL, 0.2)
    handle = await published(connection, await make_queue(connection, name), 2)
    await connection.api(f"STREAM.DELETE.{name}")
    await publish_jobs(connection, await make_queue(connection, name), "ab")
    with pytest.raises(QueueGoneError, match="deleted and created anew"):
        await wait_by_handle(connection, handle, time_limit=LONG)


@pytest.mark.parametrize("cancels", [False, True])
async def test_a_failed_wait_cancels_what_still_waits_if_it_is_to(
    connection: NatsPyConnection, name: str, *, cancels: bool
) -> None:
    queue = await make_queue(connection, name)
    handle = await published(connection, queue, 4)
    waiting = asyncio.create_task(
        wait_by_handle(connection, handle, time_limit=LONG, cancel_on_failure=cancels, policy=WaitPolicy(max_dead=0))
    )
    await exhaust_deliveries(connection, queue, 1)
    with pytest.raises(JobsDeadError):
        await waiting
    cancelled = await stream_messages(connection, f"{name}-events", f"cancelled.{name}.*")
    assert sorted(message.subject for message in cancelled) == (
        [f"cancelled.{name}.{sequence}" for sequence in (2, 3, 4)] if cancels else []
    )


@pytest.mark.parametrize("cancels", [False, True])
async def test_a_wait_that_is_over_in_time_cancels_too(
    connection: NatsPyConnection, name: str, *, cancels: bool
) -> None:
    queue = await make_queue(connection, name)
    handle = await published(connection, queue, 2)
    with pytest.raises(DeadlineError, match=f"expected every job of {name} to end within 0.5 s, found 2 that did not"):
        await wait_by_handle(connection, handle, time_limit=0.5, cancel_on_failure=cancels)
    cancelled = await stream_messages(connection, f"{name}-events", f"cancelled.{name}.*")
    assert sorted(message.subject for message in cancelled) == (
        [f"cancelled.{name}.{sequence}" for sequence in (1, 2)] if cancels else []
    )


async def test_a_queue_whose_jobs_nobody_can_await_gives_no_handle(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, events=None)
    report = await publish_with_handle(connection, queue, [Job("a", f"{name}.jobs.x")])
    assert (report.stored, report.handle) == (1, None)
    with pytest.raises(ArgumentError, match="whose queue has to declare events"):
        await wait_by_handle(connection, report)


@pytest.mark.slow
@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        "",
        "handle",
        "[" * 100_000,
        {},
        [],
        {"type": "io.airflow.jetstream.v1.jobs"},
        {"handle": None},
        {"cursor": {"queue": "q"}, "sequences": [[1, 2]]},
        {"cursor": {"queue": 7, "created": 1, "events": 1, "events_from": "x", "dead_letters": 1}},
        {"cursor": CURSOR | {"queue": "a.b"}},
        {"cursor": CURSOR | {"events": ">"}},
        {"cursor": CURSOR | {"dead_letters": "a b\r\n"}},
        {"cursor": CURSOR | {"created": "yesterday"}},
        {"cursor": CURSOR | {"created": "2026-01-01T00:00:00"}},
        {"cursor": CURSOR | {"events_from": -1}},
        {"cursor": CURSOR | {"events_from": True}},
        {"cursor": CURSOR | {"dead_letters_from": 10**30}},
        {"cursor": CURSOR | {"advisory_subjects": ["a..b"]}},
        {"cursor": CURSOR | {"advisory_subjects": 7}},
        {"cursor": CURSOR, "sequences": [[0, 1]]},
        {"cursor": CURSOR, "sequences": [["1", None]]},
        {"cursor": CURSOR, "sequences": [[9, 1]] * 100_000},
        {"cursor": CURSOR, "parts": [[-1, 1, "0" * 32]]},
        {"cursor": CURSOR, "parts": [[7, 1, "0" * 32]] * 100_000},
        {"cursor": CURSOR, "parts": [[7, 1]]},
        {"cursor": CURSOR, "key": 7},
        {"cursor": CURSOR, "advised": {"digest": 0}},
    ],
)
def test_what_is_no_handle_is_refused(value: object) -> None:
    assert JobsHandle.of({"cursor": CURSOR}).cursor.queue == "q"
    with pytest.raises(ArgumentError, match="expected the handle of published jobs"):
        JobsHandle.of(value)


async def test_a_handle_that_claims_too_many_jobs_is_refused(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    handle = await published(connection, queue, 1) | {"sequences": [[1, 10**18]]}
    with pytest.raises(ArgumentError, match="expected a handle on at most 20,000,000 jobs, found 1,000"):
        await wait_by_handle(connection, handle)


@pytest.mark.parametrize("by_task", [False, True])
async def test_the_ends_of_a_handles_jobs_are_read_from_where_the_events_were_before_them(
    connection: NatsPyConnection, name: str, *, by_task: bool
) -> None:
    queue = await make_queue(connection, name, jobs="abc")
    await store_completions(connection, queue, [1, 2, 3])
    origin = Origin("dag", "run", "task") if by_task else None
    jobs = [Job(str(number), f"{name}.jobs.x") for number in range(2)]
    report = await publish_with_handle(connection, queue, jobs, origin=origin)
    assert JobsHandle.of(report).cursor.events_from == 4
    await store_completions(connection, queue, [4, 5])
    assert (await wait_by_handle(connection, report, time_limit=LONG)).completed == {4, 5}
    # The positions belong to a stream that is gone.
    await connection.api(f"STREAM.DELETE.{name}-events")
    await provision(connection, queue)
    await store_completions(connection, queue, [4, 5])
    assert (await wait_by_handle(connection, report, time_limit=LONG)).completed == {4, 5}
