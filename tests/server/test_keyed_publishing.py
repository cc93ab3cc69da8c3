"""A program publishes its jobs once for an idempotency key, without an Airflow."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    ArgumentError,
    Job,
    NotFoundError,
    Origin,
    Publication,
    QueueDeclarationError,
    WorkQueue,
    find_dead_letters,
    publish,
    publish_with_handle,
    wait,
    wait_by_handle,
)
from testbed.dead_letters import change_stream, stream_messages
from testbed.face import publish_until_killed
from testbed.queues import exhaust_deliveries, make_queue, process_all, pull_jobs, stored_count

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection

# The server forgets message ids after it, as it would after a night.
WINDOW: dict[str, Any] = {"duplicate_window": "100ms"}
AFTER_WINDOW = 0.25
KEY = "bills of 2026-11-27"


@pytest.mark.parametrize("jobs", [["a", "b", "a"], [Job("a", id="1"), Job("b", id="2", headers={"X": "y"}), "c"]])
async def test_a_program_that_starts_again_publishes_nothing_again_however_late(
    connection: NatsPyConnection, name: str, jobs: list[object]
) -> None:
    queue = await make_queue(connection, name, archive=False, **WINDOW)
    first = await publish(connection, queue, jobs, subject=f"{name}.jobs.x", idempotency_key=KEY)
    assert (list(first.sequences), first.duplicates) == ([1, 2, 3], 0)
    await process_all(connection, queue)
    await asyncio.sleep(AFTER_WINDOW)
    for again in (jobs, jobs[::-1], iter(jobs)):
        report = await publish(connection, queue, again, subject=f"{name}.jobs.x", idempotency_key=KEY)
        assert (sorted(report.sequences), report.duplicates) == ([1, 2, 3], 3)
    assert await stored_count(connection, name) == 0


async def test_a_program_that_was_killed_publishes_the_rest_at_its_next_start(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, archive=True, **WINDOW)
    for stored in (1, 3):
        await publish_until_killed(connection, queue, ["a", "b", "c", "d"][:stored], KEY, subject=f"{name}.jobs.x")
        await process_all(connection, queue)
        await asyncio.sleep(AFTER_WINDOW)
    report = await publish(connection, queue, "dcba", subject=f"{name}.jobs.x", idempotency_key=KEY)
    assert (list(report.sequences), report.duplicates) == ([4, 3, 2, 1], 3)


async def test_another_key_and_no_key_are_other_jobs(connection: NatsPyConnection, name: str) -> None:
    queue, subject = await make_queue(connection, name), f"{name}.jobs.x"
    named = [Job("a", id="a")]
    for number, key in enumerate((KEY, f"{KEY} ", KEY.upper(), None), 1):
        report = await publish(connection, queue, named, subject=subject, idempotency_key=key)
        assert (list(report.sequences), report.duplicates) == ([number], 0)
    task = Origin("dag", "run", "task", idempotency_key=KEY, max_tries=0)
    assert list((await publish(connection, queue, named, subject=subject, origin=task)).sequences) == [5]


async def test_a_changed_body_under_an_id_of_the_key_is_refused(connection: NatsPyConnection, name: str) -> None:
    queue, subject = await make_queue(connection, name, **WINDOW), f"{name}.jobs.x"
    await publish(connection, queue, [Job("a", id="1")], subject=subject, idempotency_key=KEY)
    await asyncio.sleep(AFTER_WINDOW)
    with pytest.raises(ValueError, match="job 0 has the id '1', under which this task has stored another body"):
        await publish(connection, queue, [Job("b", id="1")], subject=subject, idempotency_key=KEY)
    assert await stored_count(connection, name) == 1


async def test_jobs_of_a_key_name_no_task(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await publish(connection, queue, ["a", Job("b", headers={"X": "y"})], subject=f"{name}.jobs.x", idempotency_key=KEY)
    stored = await stream_messages(connection, name)
    assert [[key for key, _ in message.headers if key.startswith("Airflow")] for message in stored] == [[], []]
    await exhaust_deliveries(connection, queue, 2)
    letters = (await find_dead_letters(connection, queue)).letters
    assert [letter.origin for letter in letters] == [None, None]


async def test_a_start_waits_for_the_jobs_of_the_one_before_it(connection: NatsPyConnection, name: str) -> None:
    queue, subject = await make_queue(connection, name, consumer={"sample_freq": "100%"}, **WINDOW), f"{name}.jobs.x"
    await publish(connection, queue, ["a", "b"], subject=subject, idempotency_key=KEY)
    await process_all(connection, queue)
    await asyncio.sleep(AFTER_WINDOW)
    async with Publication(connection, queue, KEY, waits=True) as publication:
        report = await publication.publish(["a", "b"], subject=subject)
        assert publication.cursor is not None
        ended = await wait(connection, publication.cursor, report.awaited())
        await publication.close()
    assert (report.duplicates, len(ended.completed), ended.awaited) == (2, 2, set())
    published = await publish_with_handle(connection, queue, ["a", "c"], subject=subject, idempotency_key=KEY)
    await process_all(connection, queue)
    ended = await wait_by_handle(connection, published.handle)
    assert (len(ended.completed), ended.awaited) == (2, set())


@pytest.mark.parametrize("key", ["", "  ", 7, b"key", "x" * 1_025, "é" * 513, "a\nb", "\ud800", "a\0b"])
async def test_what_is_no_key_is_refused_before_anything_is_sent(
    connection: NatsPyConnection, name: str, key: Any
) -> None:
    queue = await make_queue(connection, name)
    with pytest.raises(ArgumentError, match="text as idempotency_key, found"):
        await publish(connection, queue, ["a"], subject=f"{name}.jobs.x", idempotency_key=key)
    assert await stored_count(connection, name) == 0


async def test_a_key_that_nothing_records_is_refused(connection: NatsPyConnection, name: str) -> None:
    async def refused(
        queue: WorkQueue | None, error: type[Exception], match: str, origin: Origin | None = None
    ) -> None:
        with pytest.raises(error, match=match):
            await publish(connection, queue, ["a"], subject=f"{name}.jobs.x", idempotency_key=KEY, origin=origin)

    without = await make_queue(connection, name, events=None)
    await refused(without, QueueDeclarationError, "expected events, which record what is published")
    await refused(None, QueueDeclarationError, "expected events, which record what is published")
    queue = await make_queue(connection, f"{name}2")
    await refused(queue, ArgumentError, "either an origin or an idempotency_key", Origin("dag", "run", "task"))
    await change_stream(connection, f"{name}2-events", subjects=[f"completed.{name}2.>"])
    await refused(queue, QueueDeclarationError, re.escape(f"found that it captures no published.{name}2.>"))
    await connection.api(f"STREAM.DELETE.{name}2")
    await refused(queue, NotFoundError, f"{name}2")
    assert await stored_count(connection, name) == 0


async def test_a_publication_that_is_left_without_publishing_leaves_the_key_open(
    connection: NatsPyConnection, name: str
) -> None:
    queue, subject = await make_queue(connection, name), f"{name}.jobs.x"
    async with Publication(connection, queue, KEY) as publication:
        pass
    # Nothing would be recorded of what it publishes.
    for left in (publication, Publication(connection, queue, KEY)):
        with pytest.raises(ArgumentError, match="expected one publish within 'async with' of a Publication"):
            await left.publish(["a"], subject=subject)
    report = await publish(connection, queue, ["a"], subject=subject, idempotency_key=KEY)
    assert list(report.sequences) == [1]
    assert [job.data for job in await pull_jobs(connection, queue, 1)] == [b"a"]
