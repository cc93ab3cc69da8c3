"""All waiters of a queue and a connection share one follower, and each gets every end of its jobs once."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    ConnectionSettings,
    Protocol,
    RedriveRequest,
    WaitPolicy,
    connect,
    connection_settings,
    provision,
    redrive_dead_letters,
    take_cursor,
    wait,
)
from airflow_provider_jetstream.jetstream.contract import MSG_ID, completion_subject, end_id, ended_job_time
from airflow_provider_jetstream.jetstream.errors import NotFoundError, QueueGoneError, UnreachableError
from testbed import seams
from testbed.queues import (
    eventually,
    exhaust_deliveries,
    make_dead_letters,
    make_queue,
    process_all,
    publish_jobs,
    pull_jobs,
    store_completion,
    stored_count,
    stored_nanoseconds,
)
from testbed.waiters import WaitingCost, start_waiting, store_completions, wait_failures, wait_reports

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

IN_PLACE = RedriveRequest(protocol=Protocol.IN_PLACE)
MAX_RECENT = seams.FOLLOWER_RECENT


@pytest.mark.slow
async def test_any_number_of_waiters_of_a_connection_share_at_most_six_readers(own_nats: NatsServer, name: str) -> None:
    settings = connection_settings({"servers": (own_nats.url,), "timeout": 5})
    async with connect(settings) as connection, connect(settings) as other:
        queue = await make_queue(other, name)
        early = await take_cursor(other, queue)
        jobs = await publish_jobs(other, queue, map(str, range(2_500)))
        await store_completions(other, queue, jobs[:2_000])
        late = await take_cursor(other, queue)
        readers = WaitingCost(own_nats, other, (f"{name}-events", f"{name}-dead"))
        watching = asyncio.create_task(readers.watch())
        waiters = [start_waiting(connection, late, [job]) for job in jobs[2_000:]]
        await eventually(lambda: readers.equals((3, 2)))
        # Waiters with an earlier cursor.
        waiters += [
            start_waiting(connection, early, [done, job]) for done, job in zip(jobs, jobs[2_000:], strict=False)
        ]
        await eventually(lambda: sum(len(waiter.remaining) for waiter in waiters) == 500)
        await eventually(lambda: readers.equals((3, 2)))
        assert own_nats.monitor("connz")["num_connections"] == 2
        await store_completions(other, queue, jobs[2_000:])
        outcomes = await wait_reports(waiters)
        await eventually(lambda: readers.equals((0, 0)))
        watching.cancel()
        await asyncio.wait([watching])
    assert [len(report.completed) for report in outcomes] == [1] * 500 + [2] * 500
    assert 3 <= readers.max_subscriptions <= 6
    assert 2 <= readers.max_consumers <= 4


@pytest.mark.slow
@pytest.mark.parametrize("max_recent", [25_000, 20])
async def test_waiters_with_older_cursors_miss_no_end_and_count_none_twice_while_ends_arrive(
    connection: NatsPyConnection,
    settings: ConnectionSettings,
    name: str,
    max_recent: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MAX_RECENT, max_recent)
    queue = await make_queue(connection, name)
    jobs = await publish_jobs(connection, queue, map(str, range(1_500)))
    cursors = {0: await take_cursor(connection, queue)}

    async def work() -> None:
        async with connect(settings) as worker:
            for start in range(0, len(jobs), 20):
                await store_completions(worker, queue, jobs[start : start + 20])
                if start % 100 == 80:
                    cursors[start + 20] = await take_cursor(worker, queue)
                # A few hundred a second.
                await asyncio.sleep(0.04)

    working, waiters, expected = asyncio.create_task(work()), [], []
    for number in count():
        if working.done():
            break
        # Any cursor with any jobs after it: some have ended long ago, some will.
        start = list(cursors)[number * 7 % len(cursors)]
        if chosen := set(jobs[start + number % 50 :: 11 + number % 40]):
            expected.append(chosen)
            waiters.append(start_waiting(connection, cursors[start], chosen))
        await asyncio.sleep(0.01)
    await working
    outcomes = await wait_reports(waiters)
    assert len(waiters) > 50
    assert [report.completed for report in outcomes] == expected
    # One end per job was reported.
    assert [waiter.remaining for waiter in waiters] == [list(range(len(sequences)))[::-1] for sequences in expected]


@pytest.mark.since_server("2.14", "the reset of a consumer")
@pytest.mark.slow
async def test_a_death_before_the_cursor_of_a_waiter_for_the_redriven_job_does_not_count(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    jobs = await make_dead_letters(connection, queue, "ab")
    before = await take_cursor(connection, queue)
    # This waiter keeps the follower that has read the first deaths.
    others = start_waiting(connection, before.from_start(), [*jobs, 99])
    await eventually(others.task.done)
    assert (await redrive_dead_letters(connection, queue, IN_PLACE)).failures == 0
    cursor = await take_cursor(connection, queue)
    holding = start_waiting(connection, before.from_start(), [99])
    again = [start_waiting(connection, cursor, [job]) for job in jobs]
    for message in await pull_jobs(connection, queue, 2):
        if message.metadata.sequence.stream == jobs[0]:
            await message.ack_sync()
            await store_completion(connection, queue, jobs[0])
        else:
            await message.nak()
    with suppress(TimeoutError):
        await pull_jobs(connection, queue, 1, within=0.6)
    completed, died = await wait_reports(again)
    holding.task.cancel()
    assert (completed.completed, completed.dead) == ({jobs[0]}, {})
    assert (died.completed, set(died.dead)) == (set(), {jobs[1]})


@pytest.mark.slow
@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_an_older_death_that_is_read_later_does_not_hide_the_newer_one(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    jobs = await make_dead_letters(connection, queue, "ab")
    # As by hand, without a redrive: the entries of the first deaths stay.
    await connection.api(f"CONSUMER.RESET.{name}.worker", {"seq": jobs[0]})
    cursor = await take_cursor(connection, queue)
    for message in await pull_jobs(connection, queue, 2):
        await (message.nak() if message.metadata.sequence.stream == jobs[0] else message.ack_sync())
    with suppress(TimeoutError):
        await pull_jobs(connection, queue, 1, within=0.6)
    holding = start_waiting(connection, cursor, [98])
    assert [*(await wait_reports([start_waiting(connection, cursor, jobs[:1])]))[0].dead] == jobs[:1]
    # Makes the follower read everything stored before, the death of the second job included.
    older = start_waiting(connection, cursor.from_start(), [*jobs, 99], WaitPolicy(max_dead=None))
    await eventually(lambda: len(older.remaining) == 2)
    assert [*(await wait_reports([start_waiting(connection, cursor, jobs[:1])], within=3))[0].dead] == jobs[:1]
    for waiter in (holding, older):
        waiter.task.cancel()


async def test_deaths_in_a_dead_letter_queue_with_work_queue_retention_reach_early_and_late_waiters(
    connection: NatsPyConnection, name: str
) -> None:
    handler = {"name": "somebody", "max_deliver": 2, "backoff": ["5s"]}
    dead_letters = {"name": f"{name}-dead", "retention": "workqueue", "consumers": [handler]}
    queue = await make_queue(connection, name, dead_letters=dead_letters)
    before = await take_cursor(connection, queue)
    jobs = await make_dead_letters(connection, queue, "ab")
    cursor = await take_cursor(connection, queue)
    jobs += await publish_jobs(connection, queue, "cd")
    early = start_waiting(connection, cursor, jobs[2:], WaitPolicy(max_dead=None))
    await exhaust_deliveries(connection, queue, 1)
    late = start_waiting(connection, before, jobs, WaitPolicy(max_dead=None))
    await eventually(lambda: len(late.remaining) == 3)
    await exhaust_deliveries(connection, queue, 1)
    first, second = await wait_reports([early, late])
    assert (sorted(first.dead), sorted(second.dead)) == (jobs[2:], jobs)
    # The dead letter queue's own consumer still gets every entry.
    assert await stored_count(connection, f"{name}-dead") == 4


@pytest.mark.slow
@pytest.mark.parametrize("gone", ["events", "dead"])
async def test_deleting_a_stream_ends_every_wait(connection: NatsPyConnection, name: str, gone: str) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, map(str, range(101)))
    waiters = [start_waiting(connection, cursor, [job, jobs[0]]) for job in jobs[1:]]
    await store_completion(connection, queue, jobs[0])
    await eventually(lambda: all(waiter.remaining for waiter in waiters))
    await connection.api(f"STREAM.DELETE.{name}-{gone}")
    outcomes = await wait_failures(waiters)
    assert {type(error) for error in outcomes} == {NotFoundError}
    assert {str(error).split(":")[0] for error in outcomes} == {
        f"expected stream {name}-{gone} on the server, found none"
    }


async def test_a_closed_connection_ends_every_wait_and_a_new_one_continues(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, map(str, range(100)))
    async with connect(settings) as closing:
        waiters = [start_waiting(closing, cursor, [job, jobs[0]]) for job in jobs]
        await store_completion(connection, queue, jobs[0])
        await eventually(lambda: all(waiter.remaining for waiter in waiters))
    outcomes = await wait_failures(waiters[1:])
    assert {type(error) for error in outcomes} == {UnreachableError}
    assert all("the connection is closed while following" in str(error) for error in outcomes)
    again = [start_waiting(connection, cursor, [job, jobs[0]]) for job in jobs]
    await store_completions(connection, queue, jobs[1:])
    assert all(len(report.awaited) == 0 for report in await wait_reports(again))


async def test_a_failed_follower_gets_no_new_waiters(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, "ab")
    first = start_waiting(connection, cursor, jobs[:1])
    await store_completion(connection, queue, 0)
    await connection.api(f"STREAM.DELETE.{name}-events")
    await wait_failures([first])
    await make_queue(connection, name)
    # The new stream counts from one again.
    cursor = await take_cursor(connection, queue)
    second = start_waiting(connection, cursor, jobs)
    await store_completions(connection, queue, jobs)
    assert (await wait_reports([second]))[0].completed == set(jobs)
    assert (await process_all(connection, queue)).total() == 2


# The end of a job counts only for the stream that stored the job, not for another one of that name.


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
    queue = await make_queue(connection, name, jobs=["of the earlier stream"])
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


# Nobody does the jobs of the queue that is created anew; those have the sequences of the awaited ones.
@pytest.mark.parametrize("others", ["", "cd"])
async def test_a_queue_that_is_created_anew_is_noticed_where_no_job_of_it_ends(
    connection: NatsPyConnection, name: str, others: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(INTERVAL, 0.2)
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, "ab")
    waiters = [start_waiting(connection, cursor, [job]) for job in jobs]
    await create_anew(connection, queue)
    await publish_jobs(connection, queue, others)
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


async def test_messages_that_are_removed_before_they_are_delivered_keep_no_wait_from_its_end(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.STREAM_TAIL_PULL, b'{"batch": 500, "expires": 30000000000, "idle_heartbeat": 100000000}')
    monkeypatch.setattr(seams.COMPARISON_INTERVAL, 0.1)
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, "ab")
    await store_completions(connection, queue, [98, 99])
    async with connect(settings) as waiting:
        publish, purged = waiting.publish, asyncio.Event()

        async def purge_before(subject: str, *message: Any, **options: Any) -> None:
            if ".MSG.NEXT." in subject and not purged.is_set():
                purged.set()
                await connection.api(f"STREAM.PURGE.{name}-events")
            await publish(subject, *message, **options)

        monkeypatch.setattr(waiting, "publish", purge_before)
        waiter = start_waiting(waiting, cursor, jobs, WaitPolicy(max_unaccounted=None))
        await purged.wait()
        await connection.api(f"STREAM.PURGE.{name}")
        (report,) = await wait_reports([waiter])
    assert report.unaccounted == set(jobs)
