"""A wait ends, or says so, where no consumer delivers a job."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import WaitPolicy, provision, take_cursor, wait
from airflow_provider_jetstream.jetstream.errors import JobsStalledError
from testbed import seams
from testbed.queues import CONSUMER, eventually, make_queue, publish_jobs, store_completion
from testbed.waiters import start_waiting, store_completions, wait_failures, wait_reports

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection

pytestmark = pytest.mark.usefixtures("short_interval")

LONG = 30.0


@pytest.fixture
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams.COMPARISON_INTERVAL, 0.1)


async def filtered_queue(connection: NatsPyConnection, name: str) -> WorkQueue:
    """Provision a queue whose consumer takes only some of its subjects."""
    return await make_queue(connection, name, consumer={"filter_subject": f"{name}.jobs.taken", "ack_wait": "30s"})


async def pause(connection: NatsPyConnection, name: str, duration: timedelta) -> str:
    """Pause the consumer, and return until when."""
    until = (datetime.now(UTC) + duration).isoformat().replace("+00:00", "Z")
    await connection.api(f"CONSUMER.PAUSE.{name}.{CONSUMER}", {"pause_until": until})
    return until


async def test_a_subject_that_no_consumer_takes_is_named(connection: NatsPyConnection, name: str) -> None:
    queue = await filtered_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    taken = await publish_jobs(connection, queue, "ab", kind="taken")
    untaken = await publish_jobs(connection, queue, "c", kind="untaken")
    fine = start_waiting(connection, cursor, taken, reconcile=0.3)
    waiter = start_waiting(connection, cursor, [*taken, *untaken], reconcile=0.3)
    (error,) = await wait_failures([waiter], within=LONG)
    assert isinstance(error, JobsStalledError)
    assert str(error) == (
        f"expected every awaited job of {name} to be delivered, found for 0.3 s that job 3 isn't: no consumer takes its"
        f" subject {name}.jobs.untaken (consumers: {CONSUMER}); provision the queue again, resume the consumer, or"
        " correct the subject of the jobs. The jobs stay stored, so don't publish them again"
    )
    # Others aren't concerned.
    assert not fine.task.done()
    await store_completions(connection, queue, taken)
    assert (await wait_reports([fine], within=LONG))[0].completed == set(taken)


async def test_a_consumer_that_is_deleted_during_the_wait_ends_it(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"})
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, "ab")
    waiter = start_waiting(connection, cursor, jobs, reconcile=0.3)
    await asyncio.sleep(0.3)
    assert not waiter.task.done()
    await connection.api(f"CONSUMER.DELETE.{name}.{CONSUMER}")
    (error,) = await wait_failures([waiter], within=LONG)
    assert isinstance(error, JobsStalledError)
    assert f"no consumer takes its subject {name}.jobs.plain (consumers: none)" in str(error)


async def test_a_paused_consumer_is_named_with_the_end_of_its_pause(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    until = await pause(connection, name, timedelta(hours=1))
    jobs = await publish_jobs(connection, queue, "ab")
    with pytest.raises(JobsStalledError, match=f"consumer {CONSUMER} is paused until {until[:19]}"):
        await wait(connection, cursor, jobs, reconcile=0.3)


async def test_a_brief_pause_such_as_that_of_a_count_under_a_pause_is_no_stall(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    await pause(connection, name, timedelta(seconds=10))
    jobs = await publish_jobs(connection, queue, "ab")
    waiter = start_waiting(connection, cursor, jobs, reconcile=0.2)
    await asyncio.sleep(1)
    assert not waiter.task.done()
    await store_completions(connection, queue, jobs)
    await wait_reports([waiter], within=LONG)


async def test_a_wait_that_goes_on_warns_once_and_ends_when_a_consumer_takes_the_jobs(
    connection: NatsPyConnection, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"})
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, "a")
    await connection.api(f"CONSUMER.DELETE.{name}.{CONSUMER}")
    waiter = start_waiting(connection, cursor, jobs, reconcile=0.2, on_stall="wait")
    warning = f"job 1 of {name} isn't delivered, and the wait goes on: no consumer takes its subject"
    await eventually(lambda: warning in caplog.text, within=LONG)
    await asyncio.sleep(0.5)
    assert caplog.text.count(warning) == 1
    await provision(connection, queue)
    await store_completion(connection, queue, jobs[0])
    assert (await wait_reports([waiter], within=LONG))[0].completed == set(jobs)


@pytest.mark.slow
async def test_a_consumer_that_comes_back_before_reconcile_seconds_is_no_stall(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"})
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, map(str, range(300)))
    waiter = start_waiting(connection, cursor, jobs, reconcile=5)
    for _ in range(3):
        await connection.api(f"CONSUMER.DELETE.{name}.{CONSUMER}")
        await asyncio.sleep(0.5)
        await provision(connection, queue)
        await asyncio.sleep(0.3)
    assert not waiter.task.done()
    await store_completions(connection, queue, jobs)
    assert len((await wait_reports([waiter], within=LONG))[0].completed) == len(jobs)


async def test_a_stalled_job_does_not_end_a_wait_that_can_do_without_it(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await filtered_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, "ab", kind="taken")
    jobs += await publish_jobs(connection, queue, "c", kind="untaken")
    two, three = (
        start_waiting(connection, cursor, jobs, WaitPolicy(min_completed=count), reconcile=0.1) for count in (2, 3)
    )
    (error,) = await wait_failures([three], within=LONG)
    assert isinstance(error, JobsStalledError)
    assert not two.task.done()
    await store_completions(connection, queue, jobs[:2])
    assert (await wait_reports([two], within=LONG))[0].completed == set(jobs[:2])


@pytest.mark.parametrize("fields", [{"filter_subjects": []}, {}])
async def test_consumers_with_several_filters_or_none_take_their_jobs(
    connection: NatsPyConnection, name: str, fields: dict[str, Any]
) -> None:
    filters = {"filter_subjects": [f"{name}.jobs.a.>", f"{name}.jobs.plain"]} if fields else {}
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", **filters})
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, "ab")
    waiter = start_waiting(connection, cursor, jobs, reconcile=0.1)
    await asyncio.sleep(0.6)
    assert not waiter.task.done()
    await store_completions(connection, queue, jobs)
    await wait_reports([waiter], within=LONG)
