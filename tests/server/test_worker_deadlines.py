"""Long jobs: in progress while their handler runs, ended at their deadline, not started once expired."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Reason,
    Selection,
    Status,
    find_dead_letters,
    get_message,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES
from airflow_provider_jetstream.worker import Delivery, Worker
from airflow_provider_jetstream.worker.errors import WorkerStuckError
from testbed.dead_letters import dead_letter_records
from testbed.face import Scan, consumer_info
from testbed.queues import completion_count, eventually, make_queue, publish_jobs, running_worker, stored_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from testbed.face import NatsPyConnection

LONG_ACK_WAIT = {"ack_wait": "30s", "max_deliver": 2}


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """An event for which hanging threads wait; set at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def settled(connection: NatsPyConnection, queue: WorkQueue) -> Callable[[], Any]:
    async def is_empty() -> bool:
        return not await stored_count(connection, queue.name)

    return is_empty


async def letters(connection: NatsPyConnection, queue: WorkQueue) -> list[tuple[int, Reason, bytes]]:
    scan = await Scan.begin(connection, queue)
    return [(letter.sequence, letter.death.reason, letter.body) async for letter in scan.letters(Selection())]


@pytest.mark.slow
async def test_with_concurrency_one_and_a_slow_handler_no_second_job_is_in_flight(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "400ms", "max_deliver": 3})
    await publish_jobs(connection, queue, "abc")
    started, go_on = asyncio.Event(), asyncio.Event()

    async def handle(_: Delivery) -> None:
        started.set()
        await go_on.wait()

    async with running_worker(Worker(queue, "worker", handle, settings)):
        await started.wait()
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            info = await consumer_info(connection, name, "worker")
            assert (info["num_ack_pending"], info["num_pending"], info["delivered"]["consumer_seq"]) == (1, 2, 1)
            assert info["num_waiting"] == 0
        go_on.set()
        await eventually(settled(connection, queue))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize("waits", [{"ack_wait": "300ms"}, {"ack_wait": None, "backoff": ["300ms", "600ms"]}], ids=str)
async def test_a_handler_may_run_longer_than_the_ack_wait_of_its_delivery(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, kind: str, waits: dict[str, Any]
) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 3} | waits)
    attempts: list[int] = []

    def fail_first(job: Delivery) -> None:
        attempts.append(job.attempt)
        if job.attempt == 1:
            raise ValueError("not yet")

    def handle(job: Delivery) -> None:
        fail_first(job)
        time.sleep(1.5)

    async def handle_async(job: Delivery) -> None:
        fail_first(job)
        await asyncio.sleep(1.5)

    await publish_jobs(connection, queue, ["a"])
    async with running_worker(
        Worker(queue, "worker", handle if kind == "plain" else handle_async, settings, concurrency=2)
    ):
        await eventually(settled(connection, queue))
    assert attempts == [1, 2]
    assert await completion_count(connection, name) == 1


@pytest.mark.slow
async def test_an_async_handler_that_hangs_is_cancelled_at_its_deadline_and_its_job_tried_again(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 3})
    cancelled: list[int] = []
    attempts: list[float] = []

    async def handle(job: Delivery) -> None:
        attempts.append(time.monotonic())
        if job.attempt == 1:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(job.attempt)
                raise

    await publish_jobs(connection, queue, ["a"])
    async with running_worker(Worker(queue, "worker", handle, settings, deadline=0.5)):
        await eventually(settled(connection, queue))
    assert cancelled == [1]
    assert 0.5 <= attempts[1] - attempts[0] < 2
    assert await dead_letter_records(connection, queue) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_a_job_whose_last_attempt_passes_the_deadline_is_dead_for_that_reason_and_the_next_one_starts(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, kind: str, released: threading.Event
) -> None:
    queue = await make_queue(connection, name, consumer=LONG_ACK_WAIT)
    done: list[bytes] = []

    def handle(job: Delivery) -> None:
        if job.body == b"hangs":
            released.wait(30)
        done.append(job.body)

    async def handle_async(job: Delivery) -> None:
        if job.body == b"hangs":
            await asyncio.sleep(30)
        done.append(job.body)

    await publish_jobs(connection, queue, ["hangs", "next"])
    worker = Worker(queue, "worker", handle if kind == "plain" else handle_async, settings, deadline=0.3)
    async with running_worker(worker):
        await eventually(lambda: done == [b"next"])

        async def stored_letters() -> list[tuple[int, Reason, bytes]]:
            return await letters(connection, queue)

        assert await eventually(stored_letters) == [(1, Reason.DEADLINE, b"hangs")]
    ((death, job),) = await dead_letter_records(connection, queue)
    assert (death.reason, death.deliveries, job.data) == (Reason.DEADLINE, 2, b"hangs")
    assert death.error_class == "airflow_provider_jetstream.worker.errors.HandlerDeadlineError"
    assert death.error_message == "expected the handler to be done within 0.3 s, found it running"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("header", "own", "seconds"), [("200ms", 30, 0.2), ("0.2", 30, 0.2), ("60", 0.2, 0.2), ("soon", 0.2, 0.2)]
)
async def test_the_shorter_of_the_jobs_and_the_workers_deadline_counts(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, header: str, own: float, seconds: float
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 1})

    async def handle(_: Delivery) -> None:
        await asyncio.sleep(20)

    await publish_jobs(connection, queue, ["a"], headers={"Job-Deadline": header})

    async def dead() -> bool:
        return bool(await dead_letter_records(connection, queue))

    async with running_worker(Worker(queue, "worker", handle, settings, deadline=own)):
        await eventually(dead, within=5)
    ((death, _),) = await dead_letter_records(connection, queue)
    assert death.error_message == f"expected the handler to be done within {seconds:g} s, found it running"


async def test_a_worker_with_too_many_hanging_threads_raises(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, released: threading.Event
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 1})
    jobs: list[int] = []

    def hang(job: Delivery) -> None:
        jobs.append(job.sequence)
        released.wait(30)

    await publish_jobs(connection, queue, map(str, range(20)))
    with pytest.raises(WorkerStuckError, match="expected at most 10 handlers to go on past their deadline, found 11"):
        async with asyncio.timeout(20):
            await Worker(queue, "worker", hang, settings, deadline=0.05).run()
    assert jobs == list(range(1, 12))
    assert (await consumer_info(connection, name, "worker"))["num_pending"] == 9


@pytest.mark.slow
async def test_a_handler_that_ends_after_its_deadline_no_longer_counts_as_abandoned(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 1})
    done: list[int] = []

    def slow(job: Delivery) -> None:
        time.sleep(0.15)
        done.append(job.sequence)

    await publish_jobs(connection, queue, map(str, range(15)))
    async with running_worker(Worker(queue, "worker", slow, settings, deadline=0.1)):
        await eventually(lambda: len(done) == 15)
    assert await completion_count(connection, name) == 0


@pytest.mark.slow
async def test_an_expired_job_is_not_started_and_becomes_a_dead_letter(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=LONG_ACK_WAIT)
    past = (datetime.now(UTC) - timedelta(seconds=1)).isoformat().replace("+00:00", "Z")
    future = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    await publish_jobs(connection, queue, ["late"], headers={"Job-Expires": past})
    await publish_jobs(connection, queue, ["in time"], headers={"Job-Expires": future})
    await publish_jobs(connection, queue, ["unreadable expiry"], headers={"Job-Expires": "tomorrow"})
    jobs: list[bytes] = []
    async with running_worker(Worker(queue, "worker", lambda job: jobs.append(job.body), settings)):
        await eventually(settled(connection, queue))
        assert jobs == [b"in time", b"unreadable expiry"]
        assert await letters(connection, queue) == [(1, Reason.EXPIRED, b"late")]
        ((death, _),) = await dead_letter_records(connection, queue)
        assert (death.explanation or "").startswith("the job expired at 2")
        # After a redrive the job is accepted.
        await redrive_dead_letters(connection, queue)
        await eventually(lambda: jobs == [b"in time", b"unreadable expiry", b"late"])
    assert await get_message(connection, name, 1) is None


@pytest.mark.slow
async def test_the_record_of_an_expired_job_proves_nothing_where_terminations_are_not_captured(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    subjects = [f"{MAX_DELIVERIES}.{name}.*", f"dead.{name}.>"]
    dead: dict[str, Any] = {"name": f"{name}-dead", "subjects": subjects}
    queue = await make_queue(connection, name, consumer=LONG_ACK_WAIT, dead_letters=dead)
    await publish_jobs(connection, queue, ["late"], headers={"Job-Expires": "2020-01-01T00:00:00Z"})
    async with running_worker(Worker(queue, "worker", print, settings)):
        await eventually(settled(connection, queue))
    # The worker may have been stopped after it had stored the record, and another kind of worker done the job.
    found = await find_dead_letters(connection, queue)
    assert (found.letters, [job.status for job in found.dismissed]) == ((), [Status.VANISHED])
    (letter,) = (await find_dead_letters(connection, queue, Selection(vanished=True))).letters
    assert (letter.death.reason, letter.body) == (Reason.EXPIRED, b"late")
