"""Handlers that take several jobs in one call: each job has an outcome of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import cancel, find_dead_letters
from airflow_provider_jetstream.worker import Delivery, GiveUpError, RetryLaterError, Worker
from airflow_provider_jetstream.worker.errors import WorkerSetupError
from testbed.face import consumer_info, last_message, stream_info
from testbed.queues import (
    completion_count,
    eventually,
    make_queue,
    publish_jobs,
    running_worker,
    small_queue,
    until_stored,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from testbed.face import NatsPyConnection

LONG = {"ack_wait": "30s", "max_deliver": 3}


async def result_of(connection: NatsPyConnection, queue: WorkQueue, sequence: int) -> object:
    message = await last_message(connection, f"{queue.name}-events", f"completed.{queue.name}.worker.{sequence}")
    assert message is not None
    return json.loads(message.data).get("result")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_each_job_of_a_batch_has_its_own_outcome(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, kind: str
) -> None:
    queue = await make_queue(connection, name, consumer=LONG)
    bodies = ["done", "none", "hopeless", "later", "broken", "done"]
    await publish_jobs(connection, queue, bodies)
    attempts: Counter[bytes] = Counter()
    first: list[list[bytes]] = []

    def outcome(job: Delivery) -> object:
        attempts[job.body] += 1
        if job.attempt > 1 or job.body == b"done":
            return {"attempt": job.attempt}
        return {
            b"hopeless": GiveUpError("never"),
            b"later": RetryLaterError(0, "not yet"),
            b"broken": OSError("no printer"),
            b"none": None,
        }[job.body]

    def handle(jobs: list[Delivery]) -> list[object]:
        first.append([job.body for job in jobs])
        return [outcome(job) for job in jobs]

    async def handle_async(jobs: list[Delivery]) -> list[object]:
        await asyncio.sleep(0)
        return handle(jobs)

    worker = Worker(queue, "worker", handle if kind == "plain" else handle_async, settings, batch=10)
    async with running_worker(worker):
        await until_stored(connection, name, 0, within=30)
    assert attempts == {b"done": 2, b"none": 1, b"hopeless": 1, b"later": 2, b"broken": 2}
    assert [await result_of(connection, queue, sequence) for sequence in (1, 2, 4, 5, 6)] == [
        {"attempt": 1},
        None,
        {"attempt": 2},
        {"attempt": 2},
        {"attempt": 1},
    ]
    (letter,) = (await find_dead_letters(connection, queue)).letters
    assert (letter.death.sequence, letter.death.explanation) == (3, "never")


async def test_a_batch_without_results_may_return_none_and_what_it_raises_is_every_jobs_outcome(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=LONG, jobs=map(str, range(4)))
    attempts: Counter[int] = Counter()

    async def handle(jobs: list[Delivery]) -> None:
        attempts.update(job.attempt for job in jobs)
        if any(job.attempt == 1 for job in jobs):
            raise RetryLaterError(0, "all together")

    async with running_worker(Worker(queue, "worker", handle, settings, batch=4)):
        await until_stored(connection, name, 0, within=30)
    assert attempts == {1: 4, 2: 4}
    assert await completion_count(connection, name) == 4


async def test_a_completion_that_is_refused_costs_no_other_job_of_its_batch_anything(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await make_queue(connection, name, consumer=LONG)
    config = (await stream_info(connection, f"{name}-events"))["config"]
    await connection.api(f"STREAM.UPDATE.{name}-events", {**config, "max_msg_size": 1_000})
    await publish_jobs(connection, queue, map(str, range(10)))

    refused: list[str] = []

    async def handle(jobs: list[Delivery]) -> list[str | None]:
        refused.extend(job.id for job in jobs if job.body == b"4")
        # The completion of the fifth is larger than its stream takes.
        return ["x" * 1_000 if job.body == b"4" else None for job in jobs]

    async def left() -> list[int]:
        state = (await stream_info(connection, name))["state"]
        return [state["messages"], state["first_seq"]]

    async with running_worker(Worker(queue, "worker", handle, settings, batch=10, grace=0.1)):

        async def others_are_done() -> bool:
            return await left() == [1, 5]

        await eventually(others_are_done)
        await eventually(lambda: "isn't confirmed" in caplog.text)
        await connection.api(f"STREAM.UPDATE.{name}-events", config)
        await until_stored(connection, name, 0)
    repeated = {record.getMessage() for record in caplog.records if "isn't confirmed" in record.getMessage()}
    assert all(f"the completion of job {refused[0]} isn't confirmed" in text for text in repeated)
    assert await result_of(connection, queue, 5) == "x" * 1_000
    assert await completion_count(connection, name) == 10


@pytest.mark.parametrize(
    ("returned", "found"), [([1], "found 1 of them"), ("ab", "found str"), ({0: 1}, "found dict")], ids=repr
)
async def test_outcomes_that_are_not_one_for_each_job_complete_none(
    connection: NatsPyConnection,
    settings: ConnectionSettings,
    name: str,
    returned: object,
    found: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 1}, jobs=["a", "b"])
    async with running_worker(Worker(queue, "worker", lambda _: returned, settings, batch=2)):
        await until_stored(connection, f"{name}-dead", 4, within=30)
    assert f"expected a batch handler to return 2 outcomes, one for each job, {found}" in caplog.text
    assert await completion_count(connection, name) == 0


@pytest.mark.slow
async def test_a_batch_starts_with_the_jobs_that_are_there_and_no_more_are_pulled_than_its_calls_take(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=LONG)
    opened, sizes = asyncio.Event(), list[int]()

    async def handle(jobs: list[Delivery]) -> None:
        sizes.append(len(jobs))
        await opened.wait()

    async with running_worker(Worker(queue, "worker", handle, settings, batch=5, concurrency=2)):
        await publish_jobs(connection, queue, ["alone"])
        await eventually(lambda: sizes == [1])
        await publish_jobs(connection, queue, map(str, range(30)))
        await eventually(lambda: len(sizes) == 2)
        for _ in range(10):
            assert (await consumer_info(connection, name, "worker"))["num_ack_pending"] <= 10
            assert len(sizes) == 2
            await asyncio.sleep(0.05)
        opened.set()
        await until_stored(connection, name, 0, within=30)
    assert (sum(sizes), max(sizes) <= 5) == (31, True)


async def test_a_job_of_a_batch_that_is_cancelled_or_expired_is_not_given_to_the_handler(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=LONG)
    await publish_jobs(connection, queue, ["cancelled"], headers={"Job-Id": "one"})
    await publish_jobs(connection, queue, ["expired"], headers={"Job-Expires": "2020-01-01T00:00:00Z"})
    await publish_jobs(connection, queue, ["valid"], headers={"Job-Expires": "2126-01-01T00:00:00Z"})
    await publish_jobs(connection, queue, ["plain"])
    await cancel(connection, queue, "one")
    handled: list[bytes] = []

    async def handle(jobs: list[Delivery]) -> list[int]:
        handled.extend(job.body for job in jobs)
        return [job.sequence for job in jobs]

    async with running_worker(Worker(queue, "worker", handle, settings, batch=10)):
        await until_stored(connection, name, 0, within=30)
    assert sorted(handled) == [b"plain", b"valid"]
    assert [await result_of(connection, queue, sequence) for sequence in (3, 4)] == [3, 4]


@pytest.mark.slow
async def test_a_batch_ends_at_its_shortest_deadline_and_with_the_worker(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await make_queue(connection, name, consumer=LONG | {"max_deliver": 10})
    await publish_jobs(connection, queue, ["a"], headers={"Job-Deadline": "300ms"})
    await publish_jobs(connection, queue, ["b"])
    attempts: list[int] = []
    started = asyncio.Event()

    async def hang(jobs: list[Delivery]) -> None:
        attempts.extend(job.attempt for job in jobs)
        if 2 in attempts:
            started.set()
        await asyncio.sleep(60)

    async with running_worker(Worker(queue, "worker", hang, settings, batch=2, concurrency=2, grace=0.1)):
        await eventually(started.is_set, within=30)
    assert "expected the handler to be done within 0.3 s, found it running" in caplog.text
    # Handed back rather than left to the ack wait.
    done: list[int] = []
    async with running_worker(Worker(queue, "worker", lambda job: done.append(job.sequence), settings)):
        await eventually(lambda: sorted(done) == [1, 2], within=20)


@pytest.mark.slow
async def test_a_plain_batch_handler_that_hangs_in_its_thread_is_left_behind(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 2}, jobs=["a", "b"])
    release = threading.Event()
    calls: list[int] = []

    def handle(jobs: list[Delivery]) -> None:
        calls.append(len(jobs))
        if len(calls) == 1:
            release.wait(60)

    try:
        async with running_worker(Worker(queue, "worker", handle, settings, batch=1, deadline=0.3)):
            await until_stored(connection, name, 0, within=30)
    finally:
        release.set()
    assert len(calls) == 3


async def test_a_batch_worker_that_cannot_run_is_refused(settings: ConnectionSettings, name: str) -> None:
    queue = small_queue(name)
    with pytest.raises(ValueError, match="expected a batch of at least 1 job, found 0"):
        Worker(queue, "worker", print, settings, batch=0)
    with pytest.raises(WorkerSetupError, match="expected a batch handler outside of processes"):
        Worker(queue, "worker", print, settings, batch=2, processes=True)
    with pytest.raises(WorkerSetupError, match="expected a handler that takes a list of jobs"):
        Worker(queue, "worker", lambda: None, settings, batch=2)
