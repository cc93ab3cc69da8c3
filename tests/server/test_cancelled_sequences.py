"""What a task cancels are its own jobs, by their sequences: others may have the same ids; and jobs of many ids."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import Job, Origin, WaitPolicy, cancel, publish, take_cursor, wait
from airflow_provider_jetstream.jetstream.cancellation.cancel import cancel_jobs, cancel_stored
from airflow_provider_jetstream.worker import Delivery, Worker
from testbed.dead_letters import stream_messages
from testbed.face import find_cancellation
from testbed.queues import eventually, make_queue, publish_jobs, pull_jobs, running_worker, stored_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.face import NatsPyConnection

ORIGIN = Origin("shop", "manual__2026-01-01T00:00:00+00:00", "send")
# Two publishers whose jobs have the same ids; the first one's are cancelled.
PUBLISHERS: dict[str, tuple[Origin | None, Origin | None]] = {
    "two deployments": (replace(ORIGIN, run="first"), replace(ORIGIN, run="second")),
    "two DAGs": (ORIGIN, replace(ORIGIN, dag_id="bills")),
    "two tasks of a DAG": (ORIGIN, replace(ORIGIN, task_id="again")),
    "a task and a program": (ORIGIN, None),
}
JOBS: dict[str, Callable[[str], object]] = {
    "a given id": lambda publisher: Job(publisher, id="7"),
    "the id of the body": lambda publisher: {"id": 7, "of": publisher},
}


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
@pytest.mark.parametrize("publishers", PUBLISHERS.values(), ids=PUBLISHERS)
async def test_only_the_jobs_of_the_task_that_ends_are_cancelled(
    connection: NatsPyConnection,
    settings: ConnectionSettings,
    name: str,
    publishers: tuple[Origin | None, Origin | None],
    job: Callable[[str], object],
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    published = [
        await publish(connection, queue, [job(who)], subject=f"{name}.jobs.a", origin=origin)
        for who, origin in zip(("first", "second"), publishers, strict=True)
    ]
    first, second = (list(report.sequences) for report in published)
    assert (first, second) == ([1], [2])
    assert await cancel_stored(connection, name, f"{name}-events", first, "ended", created=cursor.created) == 1
    started: list[int] = []
    async with running_worker(Worker(queue, "worker", lambda job: started.append(job.sequence), settings)):
        report = await wait(connection, cursor, [*first, *second], policy=WaitPolicy(max_cancelled=None))
    assert (started, report.completed, dict(report.cancelled)) == (second, set(second), {1: "ended"})


async def test_a_running_job_is_ended_and_another_one_of_its_id_goes_on(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"})
    cursor = await take_cursor(connection, queue)
    await publish_jobs(connection, queue, ["a", "b"], headers={"Job-Id": "one"})
    running: set[int] = set()
    go_on = asyncio.Event()

    async def handle(job: Delivery) -> None:
        running.add(job.sequence)
        await go_on.wait()

    async with running_worker(Worker(queue, "worker", handle, settings, concurrency=2)):
        await eventually(lambda: len(running) == 2)
        assert await cancel_stored(connection, name, f"{name}-events", [2]) == 1
        await wait(connection, cursor, [2], policy=WaitPolicy(max_cancelled=None))
        assert await stored_count(connection, name) == 1
        go_on.set()
        report = await wait(connection, cursor, [1, 2], policy=WaitPolicy(max_cancelled=None))
    assert (report.completed, set(report.cancelled)) == ({1}, {2})


@pytest.mark.slow
async def test_each_of_several_cancelled_jobs_of_an_id_is_cancelled(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    """A later cancellation of an id, or of another job of it, takes no earlier one back."""
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    events = f"{name}-events"
    await publish_jobs(connection, queue, ["a"], headers={"Job-Id": "one"})
    await cancel(connection, queue, "one")
    await publish_jobs(connection, queue, ["b", "c", "d", "e"], headers={"Job-Id": "one"})
    for sequence in (2, 4):
        await cancel_stored(connection, name, events, [sequence])
    started: list[int] = []
    async with running_worker(Worker(queue, "worker", lambda job: started.append(job.sequence), settings)):
        report = await wait(connection, cursor, [1, 2, 3, 4, 5], policy=WaitPolicy(max_cancelled=None))
    assert (started, set(report.cancelled)) == ([3, 5], {1, 2, 4})


@pytest.mark.slow
async def test_a_job_without_an_id_is_cancelled_by_its_sequence(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    await publish_jobs(connection, queue, ["a", "b"])
    # Its id is the sequence of the other one.
    await publish_jobs(connection, queue, ["c"], headers={"Job-Id": "1"})
    assert await cancel_stored(connection, name, f"{name}-events", [1]) == 1
    started: list[int] = []
    async with running_worker(Worker(queue, "worker", lambda job: started.append(job.sequence), settings)):
        report = await wait(connection, cursor, [1, 2, 3], policy=WaitPolicy(max_cancelled=None))
    assert (started, set(report.cancelled)) == ([2, 3], {1})


@pytest.mark.slow
async def test_a_job_of_a_queue_that_was_created_anew_is_another_one(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name)
    await publish_jobs(connection, queue, ["a"], headers={"Job-Id": "one"})
    await cancel_stored(connection, name, f"{name}-events", [1])
    await connection.api(f"STREAM.DELETE.{name}")
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    await publish_jobs(connection, queue, ["b"], headers={"Job-Id": "one"})
    async with running_worker(Worker(queue, "worker", lambda _: None, settings)):
        report = await wait(connection, cursor, [1])
    assert report.completed == {1}


@pytest.mark.slow
async def test_a_wait_that_begins_beside_others_is_told_of_a_cancellation(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    """The acknowledgement of a cancelled job comes last, and says nothing of its own."""
    queue = await make_queue(connection, name, consumer={"sample_freq": "100%", "ack_wait": "30s"})
    cursor = await take_cursor(connection, queue)
    await publish_jobs(connection, queue, ["a", "b"])
    policy = WaitPolicy(max_cancelled=None)
    # It shares what it has read with those that begin later.
    other = asyncio.create_task(wait(connection, cursor, [3], policy=policy))
    assert await cancel_stored(connection, name, f"{name}-events", [1]) == 1
    async with running_worker(Worker(queue, "worker", lambda _: None, settings)):
        await wait(connection, cursor, [1, 2], policy=policy)

        async def both_are_acknowledged() -> bool:
            metrics = f"$JS.EVENT.METRIC.CONSUMER.ACK.{name}.*"
            return len(await stream_messages(connection, f"{name}-events", metrics)) == 2

        await eventually(both_are_acknowledged)
        await wait(connection, cursor, [2], policy=policy)
        late = await wait(connection, cursor, [1, 2], policy=policy)
        await publish_jobs(connection, queue, ["c"])
        await other
    assert (late.completed, set(late.cancelled)) == ({2}, {1})


async def test_stored_jobs_are_cancelled_whatever_states_their_id(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    jetstream = connection.client.jetstream()
    subject = f"{name}.jobs.a"
    await jetstream.publish(subject, b'{"id": 7}')
    await jetstream.publish(subject, b"x", headers={"Nats-Msg-Id": "m"})
    await jetstream.publish(subject, b"x")
    assert await cancel_stored(connection, queue.name, f"{name}-events", [1, 2, 3]) == 3


async def test_many_ids_are_cancelled_once_each_with_their_schedules(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, schedules=True)
    jobs = [Job(b"", id="later", delay="1h"), *(Job(b"", id=f"job-{number}") for number in range(300))]
    await publish(connection, queue, jobs, subject=f"{name}.jobs.a")
    ids = [*(f"job-{number}" for number in range(300)), "later", "job-7", "unknown"]
    reports = await cancel_jobs(connection, queue, ids, "wrong price", "ann")
    assert [report.cancellation.job_id for report in reports] == [*ids[:301], "unknown"]
    assert [report.schedules for report in reports] == [0] * 300 + [1, 0]
    for job_id in ("job-0", "job-299", "later"):
        cancellation = await find_cancellation(connection, queue, job_id)
        assert cancellation is not None
        assert (cancellation.why, cancellation.by) == ("wrong price", "ann")
    assert len(await stream_messages(connection, f"{name}-events", f"cancelled.{name}.>")) == 302


async def test_jobs_are_cancelled_by_sequence_while_they_are_stored(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "1m"})
    report = await publish(connection, queue, ["a", "b", "c"], subject=f"{name}.jobs.a")
    (first,) = await pull_jobs(connection, queue, 1)
    await first.ack_sync()
    assert await cancel_stored(connection, name, f"{name}-events", [*report.sequences, 99], "why", "ann") == 2
    cancelled = await stream_messages(connection, f"{name}-events", f"cancelled.{name}.*")
    assert [message.subject for message in cancelled] == [f"cancelled.{name}.{sequence}" for sequence in (2, 3)]
