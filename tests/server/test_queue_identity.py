"""The end of a job counts only for the stream that stored the job, not for another one of that name."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import provision, take_cursor, wait
from airflow_provider_jetstream.jetstream.contract import MSG_ID, completion_subject, end_id, ended_job_time
from airflow_provider_jetstream.jetstream.errors import QueueGoneError
from testbed import seams
from testbed.queues import eventually, make_queue, publish_jobs, pull_jobs, store_completion, stored_nanoseconds
from testbed.waiters import start_waiting, wait_failures, wait_reports

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection

INTERVAL = seams.COMPARISON_INTERVAL
LONG = 30.0


async def create_anew(connection: NatsPyConnection, queue: WorkQueue) -> None:
    """Delete the stream of a queue, and provision it again; its companions stay."""
    await connection.api(f"STREAM.DELETE.{queue.name}")
    await provision(connection, queue)


async def store_metric(connection: NatsPyConnection, queue: WorkQueue) -> None:
    """Acknowledge a job of a queue whose acknowledgements the server reports."""
    (message,) = await pull_jobs(connection, queue, 1)
    await message.ack_sync()


@pytest.mark.parametrize("evidence", ["completion", "ack metric"])
async def test_the_end_of_a_job_in_a_stream_created_anew_is_not_that_of_the_awaited_one(
    connection: NatsPyConnection, name: str, evidence: str
) -> None:
    queue = await make_queue(connection, name, consumer={"sample_freq": "100%", "ack_wait": "30s"})
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, ["mine"])
    waiter = start_waiting(connection, cursor, jobs)
    await create_anew(connection, queue)
    assert await publish_jobs(connection, queue, ["a stranger's"]) == jobs
    if evidence == "completion":
        await store_completion(connection, queue, jobs[0], result="a stranger's result")
    else:
        await store_metric(connection, queue)
    (error,) = await wait_failures([waiter], within=LONG)
    assert isinstance(error, QueueGoneError)
    assert "deleted and created anew" in str(error)
    assert "find out which of them are done before you publish any of them again" in str(error)


async def test_ends_from_before_the_stream_was_created_anew_count(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, "ab")
    for job in jobs:
        await store_completion(connection, queue, job, result=job)
    await create_anew(connection, queue)
    (report,) = await wait_reports([start_waiting(connection, cursor, jobs)], within=LONG)
    assert report.completed == set(jobs)
    assert report.results == {"1": 1, "2": 2}


@pytest.mark.slow
async def test_a_queue_that_was_deleted_after_its_jobs_ended_does_no_harm(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, "ab")
    for job in jobs:
        await store_completion(connection, queue, job)
    await connection.api(f"STREAM.DELETE.{name}")
    (report,) = await wait_reports([start_waiting(connection, cursor, jobs)], within=LONG)
    assert report.completed == set(jobs)


async def test_a_worker_that_ends_a_job_of_the_earlier_stream_late_does_not_end_the_awaited_one(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await publish_jobs(connection, queue, ["of the earlier stream"])
    (earlier,) = await pull_jobs(connection, queue, 1)
    await create_anew(connection, queue)
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, "ab")
    waiter = start_waiting(connection, cursor, jobs)

    async def complete(sequence: int, stored: int, result: Any) -> None:
        subject = completion_subject(name, "worker", sequence)
        body = (
            '{"type": "io.airflow.jetstream.v1.completion", "timestamp": "2026-01-01T00:00:00Z", "deliveries": 1,'
            f' "stream": "{name}", "consumer": "worker", "stream_seq": {sequence}, "result": "{result}"}}'
        )
        headers = {MSG_ID: end_id(name, sequence, stored)}
        await connection.client.jetstream().publish(subject, body.encode(), headers=headers)

    await complete(1, stored_nanoseconds(earlier), "earlier")
    await complete(2, time.time_ns(), "mine")
    await eventually(lambda: waiter.remaining == [1])
    await complete(1, time.time_ns(), "mine")
    (report,) = await wait_reports([waiter], within=LONG)
    assert report.results == {"1": "mine", "2": "mine"}


async def test_a_queue_that_is_created_anew_is_noticed_where_no_job_of_it_ends(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(INTERVAL, 0.2)
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, "ab")
    waiters = [start_waiting(connection, cursor, [job]) for job in jobs]
    await create_anew(connection, queue)
    errors = await wait_failures(waiters, within=LONG)
    assert [type(error) for error in errors] == [QueueGoneError] * 2


@pytest.mark.parametrize("on_stall", ["fail", "wait"])
async def test_a_queue_that_is_gone_ends_the_wait_after_reconcile_seconds_or_is_warned_of(
    connection: NatsPyConnection,
    name: str,
    on_stall: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(INTERVAL, 0.1)
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, "ab")
    await connection.api(f"STREAM.DELETE.{name}")
    if on_stall == "fail":
        with pytest.raises(QueueGoneError, match=f"expected stream {name} .* found for 0.5 s that it doesn't exist"):
            await wait(connection, cursor, jobs, reconcile=0.5)
        return
    waiter = start_waiting(connection, cursor, jobs, reconcile=0.5, on_stall="wait")
    warning = f"every job of {name} isn't delivered, and the wait goes on: stream {name} doesn't exist any more"
    await eventually(lambda: warning in caplog.text, within=LONG)
    assert not waiter.task.done()
    # What was stored before still counts.
    for job in jobs:
        await store_completion(connection, queue, job)
    assert (await wait_reports([waiter], within=LONG))[0].completed == set(jobs)


def test_the_message_id_of_an_end_says_when_its_job_was_stored() -> None:
    at = 1_777_863_721_123_456_789
    assert ended_job_time(end_id("a:b", 7, at), 7) == at
    assert end_id("a", 7, at) == "done:a:7:1777863721123456789"
    # As workers of version 1 of the contract write it.
    assert ended_job_time("done:a:7:1777863721.123457", 7) == 1_777_863_721_123_457_000
    assert ended_job_time("done:a:7:1777863721.0", 7) == 1_777_863_721_000_000_000
    others = ("", "done:a:7:", "done:a:7:soon", "other:a:7:1.0", "done:7:1.0", "done:a:7:1777863721", "done:a:7:٣.0")
    for other in (end_id("a", 17, at), *others):
        assert ended_job_time(other, 7) is None


async def test_an_end_that_states_its_jobs_time_in_another_unit_counts(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, "abc")
    seconds = int(time.time())
    for job, stated in zip(jobs, (seconds, seconds * 1_000, f"{seconds:.9e}"), strict=True):
        body = {"type": "io.airflow.jetstream.v1.completion", "timestamp": "2026-01-01T00:00:00Z", "deliveries": 1}
        body |= {"stream": name, "consumer": "worker", "stream_seq": job}
        headers = {MSG_ID: f"done:{name}:{job}:{stated}"}
        subject = completion_subject(name, "worker", job)
        await connection.client.jetstream().publish(subject, json.dumps(body).encode(), headers=headers)
    (report,) = await wait_reports([start_waiting(connection, cursor, jobs)], within=LONG)
    assert report.completed == set(jobs)
