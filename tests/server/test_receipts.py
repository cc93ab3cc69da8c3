"""What a task has published is remembered for longer than the server remembers ids."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.origin import Origin
from airflow_provider_jetstream.jetstream.publishing.job import Job, prepare_jobs
from airflow_provider_jetstream.jetstream.publishing.publish_log import PublishLog
from airflow_provider_jetstream.jetstream.publishing.publisher import publish_prepared
from airflow_provider_jetstream.jetstream.publishing.report import index_runs
from airflow_provider_jetstream.jetstream.waiting.cursor import take_cursor
from testbed.queues import make_queue, pull_jobs, store_completion

if TYPE_CHECKING:
    from collections.abc import Iterable

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.publishing.report import PublishReport
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

ORIGIN = Origin("dag", "run", "task")
KEY = "k"
WINDOW = "300ms"
FORGOTTEN = 0.5


async def publish_as_a_task(
    connection: Connection, queue: WorkQueue, jobs: Iterable[object], *, cut_off: bool = False
) -> PublishReport:
    """Publish as one try of a task does; one that is cut off stores jobs and says no more."""
    receipts = await PublishLog.open(connection, queue, KEY)
    assert receipts is not None
    receipt, before = await receipts.begin(asdict(await take_cursor(connection, queue)))
    origin = replace(ORIGIN, round=receipt.round)
    prepared = prepare_jobs(jobs, subject=f"{queue.name}.jobs.x", origin=origin, batch="", queue=queue)
    report = await publish_prepared(connection, prepared, stored_sequence=before.sequence_of)
    if not cut_off:
        await receipts.record_stored(report)
    return report


async def close(connection: Connection, queue: WorkQueue) -> None:
    receipts = await PublishLog.open(connection, queue, KEY)
    assert receipts is not None
    await receipts.close()


async def ever_stored(connection: Connection, queue: WorkQueue) -> int:
    return int((await stream_info(connection, queue.name))["state"]["last_seq"])


async def test_a_late_try_publishes_nothing_twice_although_the_jobs_are_done(connection: Connection, name: str) -> None:
    queue = await make_queue(connection, name, duplicate_window=WINDOW)
    first = await publish_as_a_task(connection, queue, "abc")
    for job in await pull_jobs(connection, queue, 3):
        await job.ack_sync()
    await asyncio.sleep(FORGOTTEN)
    again = await publish_as_a_task(connection, queue, "abc")
    assert (list(again.sequences), again.duplicates, again.stored) == (list(first.sequences), 3, 3)
    assert await ever_stored(connection, queue) == 3


async def test_a_late_try_publishes_what_is_missing(connection: Connection, name: str) -> None:
    queue = await make_queue(connection, name, duplicate_window=WINDOW, discard="new", max_msgs=3)
    first = await publish_as_a_task(connection, queue, "abcde")
    assert [failure.index for failure in first.failures] == [3, 4]
    for job in await pull_jobs(connection, queue, 3):
        await job.ack_sync()
    await asyncio.sleep(FORGOTTEN)
    again = await publish_as_a_task(connection, queue, "abcde")
    assert (list(again.sequences), again.duplicates) == ([1, 2, 3, 4, 5], 3)
    assert [job.data for job in await pull_jobs(connection, queue, 2)] == [b"d", b"e"]


@pytest.mark.parametrize("archive", [True, False])
async def test_what_a_try_stored_that_was_cut_off_is_found(connection: Connection, name: str, *, archive: bool) -> None:
    queue = await make_queue(connection, name, duplicate_window=WINDOW, archive=archive, consumer={"ack_wait": "30s"})
    await connection.client.jetstream().publish(f"{name}.jobs.other", b"somebody else's")
    await publish_as_a_task(connection, queue, "abc", cut_off=True)
    await pull_jobs(connection, queue, 1)
    (job,) = await pull_jobs(connection, queue, 1)
    await store_completion(connection, queue, job.metadata.sequence.stream, job_id=(job.headers or {})["Job-Id"])
    await job.ack_sync()
    await asyncio.sleep(FORGOTTEN)
    again = await publish_as_a_task(connection, queue, "abcd")
    assert (list(again.sequences), again.duplicates) == ([2, 3, 4, 5], 3)


async def test_an_id_of_the_users_own_is_not_taken_for_another_publishers(connection: Connection, name: str) -> None:
    queue = await make_queue(connection, name, duplicate_window=WINDOW, archive=False)
    await publish_as_a_task(connection, queue, [], cut_off=True)
    jetstream = connection.client.jetstream()
    await jetstream.publish(f"{name}.jobs.other", b"another's", headers={"Job-Id": "same"})
    (job,) = await pull_jobs(connection, queue, 1)
    await store_completion(connection, queue, 1, job_id="same")
    await job.ack_sync()
    await asyncio.sleep(FORGOTTEN)
    report = await publish_as_a_task(connection, queue, [Job(b"mine", id="same")])
    assert (list(report.sequences), report.duplicates) == ([2], 0)


async def test_once_its_jobs_have_ended_a_task_that_is_cleared_publishes_new_ones(
    connection: Connection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await publish_as_a_task(connection, queue, "ab")
    await close(connection, queue)
    # Inside the duplicate window, so that only another id makes another job.
    assert list((await publish_as_a_task(connection, queue, "ab")).sequences) == [3, 4]
    assert list((await publish_as_a_task(connection, queue, "ab")).sequences) == [3, 4]
    await close(connection, queue)
    assert list((await publish_as_a_task(connection, queue, "ab")).sequences) == [5, 6]


async def test_the_receipt_remembers_where_the_first_try_looks_for_ends(connection: Connection, name: str) -> None:
    queue = await make_queue(connection, name)
    receipts = await PublishLog.open(connection, queue, KEY)
    assert receipts is not None
    mark = asdict(await take_cursor(connection, queue))
    await receipts.begin(mark)
    later = await PublishLog.open(connection, queue, KEY)
    assert later is not None
    found, _ = await later.begin(asdict(await take_cursor(connection, queue)))
    assert found.cursor == mark


async def test_a_receipt_for_an_earlier_stream_of_the_same_name_says_nothing(connection: Connection, name: str) -> None:
    queue = await make_queue(connection, name)
    await publish_as_a_task(connection, queue, "ab")
    await connection.api(f"STREAM.DELETE.{name}")
    await make_queue(connection, name)
    report = await publish_as_a_task(connection, queue, "ab")
    assert (list(report.sequences), report.duplicates) == ([1, 2], 0)


async def test_jobs_scattered_among_others_are_looked_for(
    connection: Connection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("airflow_provider_jetstream.jetstream.publishing.publish_log._MOST_RUNS", 1)
    queue = await make_queue(connection, name, duplicate_window=WINDOW)
    await publish_as_a_task(connection, queue, "a", cut_off=True)
    await connection.client.jetstream().publish(f"{name}.jobs.other", b"between")
    first = await publish_as_a_task(connection, queue, "ab")
    assert list(first.sequences) == [1, 3]
    await asyncio.sleep(FORGOTTEN)
    again = await publish_as_a_task(connection, queue, "abc")
    assert (list(again.sequences), again.duplicates) == ([1, 3, 4], 2)


async def test_events_that_take_no_receipts_are_left_alone(connection: Connection, name: str) -> None:
    queue = await make_queue(connection, name, events={"name": f"{name}-events", "subjects": [f"completed.{name}.>"]})
    assert await PublishLog.open(connection, queue, KEY) is None
    assert await PublishLog.open(connection, await make_queue(connection, f"{name}2", events=None), KEY) is None


def test_runs_of_jobs_stored_in_a_row() -> None:
    assert index_runs([]) == []
    assert index_runs([7, 8, 9]) == [(0, 7, 3)]
    assert index_runs([0, 8, 9, 0, 11, 13]) == [(1, 8, 2), (4, 11, 1), (5, 13, 1)]
