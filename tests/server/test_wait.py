from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import (
    Cursor,
    WaitPolicy,
    connect,
    connection_settings,
    provision,
    take_cursor,
    wait,
)
from airflow_provider_jetstream.jetstream.contract import late_ack_subject
from airflow_provider_jetstream.jetstream.errors import NotFoundError, QueueDeclarationError
from airflow_provider_jetstream.worker import Worker
from testbed.queues import (
    eventually,
    exhaust_deliveries,
    make_dead_letters,
    make_queue,
    publish_jobs,
    pull_jobs,
    running_worker,
    small_queue,
    store_completion,
)
from testbed.waiters import start_waiting, wait_reports

if TYPE_CHECKING:
    from collections.abc import Iterable

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WaitReport
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer


async def wait_within(
    connection: NatsPyConnection, cursor: Cursor, sequences: Iterable[int], max_dead: int | None = 0, within: float = 10
) -> WaitReport:
    async with asyncio.timeout(within):
        return await wait(connection, cursor, sequences, policy=WaitPolicy(max_dead=max_dead))


async def test_jobs_that_a_worker_finishes_before_and_during_the_wait_are_completed(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    async with running_worker(Worker(queue, "worker", lambda job: job.attempt, settings)):
        early = await publish_jobs(connection, queue, ["early"])
        assert (await wait_within(connection, cursor, early)).completed == {1}
        waiting = asyncio.create_task(wait_within(connection, cursor, [1, 2, 3]))
        await publish_jobs(connection, queue, ["during", "later"])
        report = await waiting
    assert (report.completed, report.awaited, report.dead) == ({1, 2, 3}, set(), {})
    assert report.as_json()["completed_sequences"] == [(1, 3)]


async def test_progress_is_reported_after_each_end(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    sequences = await publish_jobs(connection, queue, "abc")
    seen: list[int] = []
    for sequence in sequences:
        await store_completion(connection, queue, sequence)
    await wait(connection, cursor, sequences, progress=lambda report: seen.append(len(report.completed)))
    assert seen == [1, 2, 3]


async def test_duplicate_completions_and_those_of_other_jobs_are_counted_once_or_not_at_all(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    await publish_jobs(connection, queue, "abc")
    for sequence in (2, 1, 1, 3):
        await store_completion(connection, queue, sequence)
    report = await wait_within(connection, cursor, [1, 3])
    assert (report.completed, report.awaited) == ({1, 3}, set())


async def test_a_job_that_used_up_its_deliveries_is_dead_and_ends_the_wait(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 2})
    cursor = await take_cursor(connection, queue)
    sequences = await make_dead_letters(connection, queue, ["poison"])
    still_waiting = await publish_jobs(connection, queue, ["good"])
    report = await wait_within(connection, cursor, [*sequences, *still_waiting])
    assert report.dead == {1: "2 deliveries to worker"}
    assert (report.completed, report.awaited) == (set(), {2})
    assert report.as_json()["dead_reasons"] == {1: "2 deliveries to worker"}


@pytest.mark.parametrize(
    ("answer", "reason"), [(b"+TERM no such printer", "no such printer"), (b"+TERM", "no reason given")]
)
async def test_a_terminated_job_is_dead_with_its_reason(
    connection: NatsPyConnection, name: str, answer: bytes, reason: str
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    sequences = await publish_jobs(connection, queue, ["hopeless"])
    (message,) = await pull_jobs(connection, queue, 1)
    await connection.client.publish(message.reply, answer)
    assert (await wait_within(connection, cursor, sequences)).dead == {1: f"terminated by worker: {reason}"}


async def test_a_job_deleted_in_flight_does_not_count_as_terminated(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"})
    cursor = await take_cursor(connection, queue)
    sequences = await publish_jobs(connection, queue, ["deleted", "good"])
    await pull_jobs(connection, queue, 2)
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": 1})
    await store_completion(connection, queue, 2)
    with pytest.raises(TimeoutError):
        await wait_within(connection, cursor, sequences, within=0.5)
    assert (await wait_within(connection, cursor, [2])).completed == {2}


@pytest.mark.parametrize(("max_dead", "awaited"), [(0, {5}), (2, {5}), (3, set()), (None, set())])
async def test_the_policy_accepts_dead_letters_up_to_its_limit(
    connection: NatsPyConnection, name: str, max_dead: int | None, awaited: set[int]
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    died = await make_dead_letters(connection, queue, "abc")
    assert died == [1, 2, 3]
    good = await publish_jobs(connection, queue, "de")
    waiting = asyncio.create_task(wait_within(connection, cursor, [*died, *good], max_dead))
    await store_completion(connection, queue, 4)
    if not awaited:
        await store_completion(connection, queue, 5)
    report = await waiting
    assert report.awaited >= awaited
    assert len(report.dead) == (3 if max_dead is None else min(max_dead + 1, 3))
    assert report.completed <= {4, 5}
    assert bool(report.awaited) == bool(awaited)


async def test_a_dead_letter_that_is_completed_later_counts_as_completed(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    sequences = [
        *await make_dead_letters(connection, queue, ["slow"]),
        *await publish_jobs(connection, queue, ["last"]),
    ]
    seen: list[set[int]] = []
    waiting = asyncio.create_task(
        wait(
            connection,
            cursor,
            sequences,
            policy=WaitPolicy(max_dead=None),
            progress=lambda report: seen.append({*report.dead}),
        )
    )
    await eventually(lambda: {1} in seen)
    await store_completion(connection, queue, 1)
    await connection.request(late_ack_subject(name, "worker", 1), b"+ACK")
    await eventually(lambda: seen[-1] == set())
    await store_completion(connection, queue, 2)
    async with asyncio.timeout(10):
        report = await waiting
    assert (report.completed, report.dead) == ({1, 2}, {})


async def test_a_later_waiter_does_not_fail_over_a_dead_letter_that_was_completed(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    sequences = [
        *await make_dead_letters(connection, queue, ["slow"]),
        *await publish_jobs(connection, queue, map(str, range(50))),
    ]
    # Its completion is read last, long after its death.
    for sequence in reversed(sequences):
        await store_completion(connection, queue, sequence)
    cursor = (await take_cursor(connection, queue)).from_start()
    report = await wait_within(connection, cursor, sequences)
    assert (report.completed, report.dead) == (set(sequences), {})


async def test_ends_from_an_earlier_stream_of_the_same_name_do_not_count(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    old = [*await make_dead_letters(connection, queue, ["dies"]), *await publish_jobs(connection, queue, ["done"])]
    await store_completion(connection, queue, 2)
    await connection.api(f"STREAM.DELETE.{name}")
    queue = await make_queue(connection, name)
    assert await publish_jobs(connection, queue, ["new", "newer"]) == old
    cursor = (await take_cursor(connection, queue)).from_start()
    with pytest.raises(TimeoutError):
        await wait_within(connection, cursor, [1, 2], within=0.5)
    # A death counts although the earlier stream's completion has the same subject.
    await exhaust_deliveries(connection, queue, 2)
    assert (await wait_within(connection, cursor, [1, 2], None)).dead.keys() == {1, 2}
    await store_completion(connection, queue, 1)
    await store_completion(connection, queue, 2)
    assert (await wait_within(connection, cursor, [1, 2])).completed == {1, 2}


@pytest.mark.slow
async def test_a_wait_survives_a_restart_of_the_server(own_nats: NatsServer, name: str) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 5})) as connection:
        queue = await make_queue(connection, name)
        cursor = await take_cursor(connection, queue)
        sequences = await publish_jobs(connection, queue, "ab")
        seen: list[int] = []
        waiting = asyncio.create_task(
            wait(
                connection,
                cursor,
                sequences,
                policy=WaitPolicy(max_dead=None),
                progress=lambda report: seen.append(len(report.awaited)),
            )
        )
        await store_completion(connection, queue, 1)
        await eventually(lambda: seen == [1])
        own_nats.kill()
        await asyncio.to_thread(own_nats.restart)
        await eventually(lambda: connection.client.is_connected)
        (first, second) = await pull_jobs(connection, queue, 2)
        await first.ack_sync()
        await second.nak()
        async with asyncio.timeout(10):
            with pytest.raises(TimeoutError):
                await pull_jobs(connection, queue, 1, within=0.2)
            report = await waiting
    assert (report.completed, list(report.dead)) == ({1}, [2])


async def test_a_queue_without_events_is_refused_with_what_to_declare(connection: NatsPyConnection, name: str) -> None:
    queue = small_queue(name, events=None)
    with pytest.raises(QueueDeclarationError, match="expected events, so that completions are stored and can be wait"):
        await take_cursor(connection, queue)


@pytest.mark.parametrize("missing", ["", "-events", "-dead"])
async def test_a_missing_stream_is_named(connection: NatsPyConnection, name: str, missing: str) -> None:
    queue = await make_queue(connection, name)
    await connection.api(f"STREAM.DELETE.{name}{missing}")
    with pytest.raises(NotFoundError, match=f"expected stream {name}{missing} on the server, found none: provision"):
        await take_cursor(connection, queue)


async def test_a_finished_wait_leaves_no_subscription(own_nats: NatsServer, name: str) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,)})) as connection:
        queue = await make_queue(connection, name)
        cursor = await take_cursor(connection, queue)
        await publish_jobs(connection, queue, "a")

        def subscribed() -> bool:
            listed = own_nats.monitor("connz?subs=1")["connections"][0].get("subscriptions_list", [])
            return any(subject.startswith("_INBOX.") for subject in listed if not subject.endswith(".*"))

        waiting = asyncio.create_task(wait_within(connection, cursor, [1]))
        await eventually(subscribed)
        await store_completion(connection, queue, 1)
        await waiting
        await eventually(lambda: not subscribed())
        cancelled = asyncio.create_task(wait_within(connection, cursor, [2]))
        await eventually(subscribed)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        await eventually(lambda: not subscribed())


@pytest.mark.parametrize("recreated", ["before", "during"])
async def test_ends_are_read_from_an_events_stream_and_a_dead_letter_queue_that_were_created_anew(
    connection: NatsPyConnection, name: str, recreated: str
) -> None:
    queue = await make_queue(connection, name)
    for sequence in range(100, 120):
        await store_completion(connection, queue, sequence)
    await make_dead_letters(connection, queue, "xyz")
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, "ab")

    async def recreate() -> None:
        for companion in ("events", "dead"):
            await connection.api(f"STREAM.DELETE.{name}-{companion}")
        await provision(connection, queue)

    if recreated == "before":
        # As for a triggerer that starts again.
        await recreate()
    waiter = start_waiting(connection, cursor, jobs, WaitPolicy(max_dead=None))
    if recreated == "during":
        again, *_ = await publish_jobs(connection, queue, "c")
        await store_completion(connection, queue, again)
        await wait_reports([start_waiting(connection, cursor, [again])])
        await recreate()
    # Their numbers begin with one again, below those of the cursor.
    await store_completion(connection, queue, jobs[0])
    for message in await pull_jobs(connection, queue, 2 + (recreated == "during")):
        await (message.term() if message.data == b"b" else message.ack())
    (report,) = await wait_reports([waiter])
    assert (report.completed, set(report.dead)) == ({jobs[0]}, {jobs[1]})


async def test_a_wait_that_is_over_or_cancelled_while_it_starts_leaves_nothing_behind(
    connection: NatsPyConnection, name: str, recwarn: pytest.WarningsRecorder
) -> None:
    queue = await make_queue(connection, name, audit=f"{name}-audit")
    cursor = await take_cursor(connection, queue)
    # Over before what it has started runs.
    await wait(connection, cursor, [])
    for turns in range(5):
        waiting = asyncio.create_task(wait(connection, cursor, [1]))
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []
