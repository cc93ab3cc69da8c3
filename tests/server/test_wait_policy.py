"""Results of a wait, and waits that end before every job has ended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import WaitPolicy, WaitReport, take_cursor, wait
from airflow_provider_jetstream.jetstream.errors import (
    JobsCancelledError,
    JobsDeadError,
    JobsIncompleteError,
    JobsUnaccountedError,
    TerminalError,
)
from airflow_provider_jetstream.worker import Worker
from testbed import seams
from testbed.queues import (
    eventually,
    exhaust_deliveries,
    make_queue,
    publish_jobs,
    pull_jobs,
    running_worker,
    store_completion,
    wait_for_entries,
)
from testbed.waiters import start_waiting, store_completions, wait_reports

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from airflow_provider_jetstream.worker import Delivery
    from testbed.face import NatsPyConnection


async def cancel(connection: NatsPyConnection, queue: WorkQueue, sequence: int) -> None:
    """Store the end of a cancelled job as a worker does."""
    await store_completion(
        connection, queue, sequence, type="io.airflow.jetstream.v1.cancelled", why="wrong price", by="ann"
    )


async def test_results_of_handlers_are_reported_by_job_id(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    jobs = [
        (await publish_jobs(connection, queue, ["x"], headers={"Job-Id": f"order-{number}"}))[0] for number in range(3)
    ]
    jobs += await publish_jobs(connection, queue, ["nameless", "nothing"])

    def handle(job: Delivery) -> Any:
        return None if job.body == b"nothing" else {"sequence": job.sequence, "worked": [True, 0.5, "ä"]}

    async with running_worker(Worker(queue, "worker", handle, settings)):
        (report,) = await wait_reports([start_waiting(connection, cursor, jobs)])
    assert report.completed == set(jobs)
    expected = {f"order-{number}": number + 1 for number in range(3)}
    assert {key: value["sequence"] for key, value in report.results.items() if key in expected} == expected
    assert len(report.results) == 4
    assert report.results["order-0"]["worked"] == [True, 0.5, "ä"]
    assert report.as_json()["results_left_out"] == 0


async def test_the_size_of_all_results_is_limited_and_omitted_ones_are_counted(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, map(str, range(100)))
    await asyncio.gather(
        *(store_completion(connection, queue, job, result="r" * 1_000, job_id=f"j{job}") for job in jobs)
    )
    report = await wait(connection, cursor, jobs)
    # 32 KiB hold so many strings of 1,002 bytes in JSON.
    assert list(report.results) == [f"j{job}" for job in jobs[:32]]
    assert (len(report.completed), report.results_left_out) == (100, 68)


@pytest.mark.parametrize(
    ("policy", "ends", "awaited", "error"),
    [
        (WaitPolicy(), "completed cancelled", 3, JobsCancelledError),
        (WaitPolicy(max_cancelled=1), "cancelled completed cancelled", 2, JobsCancelledError),
        (WaitPolicy(max_cancelled=None), "cancelled cancelled cancelled cancelled cancelled", 0, None),
        (WaitPolicy(max_cancelled=2), "cancelled completed cancelled completed completed", 0, None),
        (WaitPolicy(min_completed=1), "cancelled cancelled completed", 2, None),
        (WaitPolicy(min_completed=3), "completed cancelled completed completed", 1, None),
        (WaitPolicy(min_completed=3), "cancelled cancelled completed cancelled", 1, JobsIncompleteError),
        (WaitPolicy(min_completed=6), "", 5, JobsIncompleteError),
        (WaitPolicy(min_completed=5), "completed completed completed completed completed", 0, None),
    ],
)
async def test_waiting_stops_at_the_end_that_decides_the_outcome(
    connection: NatsPyConnection,
    name: str,
    policy: WaitPolicy,
    ends: str,
    awaited: int,
    error: type[TerminalError] | None,
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, "abcde")
    waiter = start_waiting(connection, cursor, jobs, policy)
    for number, (job, end) in enumerate(zip(jobs, ends.split(), strict=False), 1):
        assert not waiter.task.done()
        await (cancel(connection, queue, job) if end == "cancelled" else store_completion(connection, queue, job))

        def is_seen(number: int = number) -> bool:
            return len(waiter.remaining) == number

        await eventually(is_seen)
    (report,) = await wait_reports([waiter])
    assert len(report.awaited) == awaited
    assert type(policy.violation(report.as_json())) is (error or type(None))
    if report.cancelled:
        assert set(report.cancelled.values()) == {"ann: wrong price"}


async def test_one_completion_of_many_is_enough_and_the_others_are_not_awaited(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, "abcde")
    any_one, two, five = (
        start_waiting(connection, cursor, jobs, WaitPolicy(min_completed=least)) for least in (1, 2, 5)
    )
    for message in await pull_jobs(connection, queue, 3):
        await message.nak()
    await wait_for_entries(connection, queue, 3)
    # One death makes five completions of five jobs impossible.
    (impossible,) = await wait_reports([five])
    assert len(impossible.dead) >= 1
    await eventually(lambda: len(any_one.remaining) == 3)
    assert not any_one.task.done()
    await store_completion(connection, queue, jobs[3])
    (first,) = await wait_reports([any_one])
    assert (first.completed, len(first.dead), first.awaited) == ({jobs[3]}, 3, {jobs[4]})
    await store_completion(connection, queue, jobs[4])
    (both,) = await wait_reports([two])
    assert both.completed == set(jobs[3:])


async def test_dead_and_unaccounted_jobs_beyond_the_limit_end_the_wait(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.COMPARISON_INTERVAL, 0.2)
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, "abcd")
    strict = start_waiting(connection, cursor, jobs, WaitPolicy(max_unaccounted=1))
    lenient = start_waiting(connection, cursor, jobs, WaitPolicy(max_unaccounted=None, max_dead=0))
    for job in jobs[:2]:
        await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": job})
    (unaccounted,) = await wait_reports([strict])
    assert (len(unaccounted.unaccounted), len(unaccounted.awaited)) == (2, 2)
    assert type(WaitPolicy(max_unaccounted=1).violation(unaccounted.as_json())) is JobsUnaccountedError
    await exhaust_deliveries(connection, queue, 2)
    (dead,) = await wait_reports([lenient])
    assert len(dead.dead) >= 1
    assert type(WaitPolicy(max_unaccounted=None).violation(dead.as_json())) is JobsDeadError


async def test_a_wait_whose_outcome_is_decided_reads_nothing(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    assert await wait(connection, cursor, []) == WaitReport(set())
    await store_completions(connection, queue, [1])
    assert (await wait(connection, cursor, [1, 2], policy=WaitPolicy(min_completed=3))).completed == set()
