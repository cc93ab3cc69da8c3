"""Handlers in processes, and handlers that take the body as a pydantic model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from process_handlers import Order, fail, hang_with_child_process, process_id, typed

from airflow_provider_jetstream.jetstream import (
    Reason,
    Selection,
    Status,
    connect,
    connection_settings,
    find_dead_letters,
    get_message,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES
from airflow_provider_jetstream.jetstream.errors import TransientError
from airflow_provider_jetstream.worker import Delivery, Worker
from airflow_provider_jetstream.worker.errors import WorkerSetupError, WorkerStuckError
from testbed.dead_letters import dead_letter_records, stream_messages
from testbed.face import Scan, consumer_info
from testbed.nats_cluster import NatsCluster
from testbed.queues import (
    completion_count,
    eventually,
    make_queue,
    publish_jobs,
    running_worker,
    small_queue,
    stored_count,
    until_stored,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream import ConnectionSettings, Death, WorkQueue
    from testbed.face import NatsPyConnection

LONG_ACK_WAIT = {"ack_wait": "30s", "max_deliver": 2}


async def completions(connection: NatsPyConnection, queue: WorkQueue) -> dict[int, dict[str, Any]]:
    messages = await stream_messages(connection, f"{queue.name}-events", f"completed.{queue.name}.>")
    return {event["stream_seq"]: event for event in [json.loads(message.data) for message in messages]}


async def deaths(connection: NatsPyConnection, queue: WorkQueue) -> list[Death]:
    return [death for death, _ in await dead_letter_records(connection, queue)]


def children() -> set[int]:
    processes = psutil.Process().children()
    return {process.pid for process in processes if "spawn_main" in " ".join(process.cmdline())}


@pytest.mark.slow
async def test_processes_share_the_jobs_and_exit_with_the_worker(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=LONG_ACK_WAIT, jobs=map(str, range(12)))
    async with running_worker(Worker(queue, "worker", process_id, settings, concurrency=3, processes=True)):
        await until_stored(connection, queue.name, 0, within=20)
        assert 1 <= len(children()) <= 3
    pids = {completion["result"] for completion in (await completions(connection, queue)).values()}
    assert 1 <= len(pids) <= 3
    assert os.getpid() not in pids
    assert children() == set()


@pytest.mark.slow
async def test_errors_of_a_handler_in_a_process_are_those_of_a_thread(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await make_queue(connection, name, consumer=LONG_ACK_WAIT)
    await publish_jobs(
        connection, queue, ["fine", "give up", "unpicklable", "later", "exit", "killed", "exits", "unsendable"]
    )
    async with running_worker(Worker(queue, "worker", fail, settings, concurrency=2, processes=True)):
        await until_stored(connection, queue.name, 2, within=20)

        async def all_dead() -> bool:
            return len(await deaths(connection, queue)) == 3

        await eventually(all_dead)
    done = await completions(connection, queue)
    assert {completion["result"]: completion["deliveries"] for completion in done.values()} == {
        "fine": 1,
        "later": 2,
        "exit": 2,
        "killed": 2,
        "exits": 2,
    }
    records = {
        death.sequence: (death.explanation, death.error_class, death.error_message)
        for death in await deaths(connection, queue)
    }
    assert records[2] == ("no such order", "KeyError", "'order-7'")
    assert records[3] == (None, "RuntimeError", "the handler raised UnpicklableError('one two')")
    assert (records[8][2] or "").startswith("the handler returned what can't be sent: ")
    assert "the handler's process was ended by SIGKILL before the job was done" in caplog.text
    assert "the handler's process ended with status 4 before the job was done" in caplog.text
    # The traceback is that of the other process.
    assert 'raise GiveUpError("no such order") from KeyError("order-7")' not in caplog.text
    assert 'raise UnpicklableError("one", "two")' in caplog.text


@pytest.mark.slow
async def test_a_process_that_passes_the_deadline_is_killed_with_its_child_processes(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, tmp_path: Path
) -> None:
    queue = await make_queue(connection, name, consumer=LONG_ACK_WAIT)
    await publish_jobs(connection, queue, ["a"], headers={"Folder": str(tmp_path)})
    worker = Worker(queue, "worker", hang_with_child_process, settings, processes=True, deadline=1)
    async with running_worker(worker):
        await until_stored(connection, queue.name, 0, within=20)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"] == []
    assert (await completions(connection, queue))[1]["deliveries"] == 2


@pytest.mark.slow
async def test_a_process_that_is_cut_off_gives_its_job_to_another_worker_at_once(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, tmp_path: Path
) -> None:
    queue = await make_queue(connection, name, consumer=LONG_ACK_WAIT)
    await publish_jobs(connection, queue, ["a"], headers={"Folder": str(tmp_path)})
    worker = Worker(queue, "worker", hang_with_child_process, settings, processes=True, grace=0.1)
    async with running_worker(worker):
        await eventually((tmp_path / "pids").exists)
    async with running_worker(Worker(queue, "worker", hang_with_child_process, settings)):
        await until_stored(connection, queue.name, 0, within=3)


@pytest.mark.slow
async def test_handler_processes_ignore_signals_to_the_process_group(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=LONG_ACK_WAIT, jobs=["a"])
    async with running_worker(Worker(queue, "worker", process_id, settings, processes=True)):
        await until_stored(connection, queue.name, 0)
        (child,) = children()
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(child, number)
        await publish_jobs(connection, queue, ["b"])
        await until_stored(connection, queue.name, 0)
    assert [completion["result"] for completion in (await completions(connection, queue)).values()] == [child, child]


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["threads", "processes"])
async def test_a_handler_annotated_with_a_model_gets_the_body_as_one_and_invalid_bodies_are_dead_at_once(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, runner: str
) -> None:
    queue = await make_queue(connection, name, consumer=LONG_ACK_WAIT)
    bodies = ['{"item": "pen", "amount": 3}', '{"item": "ink", "amount": "s3cret"}', "{}", "no JSON"]
    await publish_jobs(connection, queue, bodies)
    async with running_worker(Worker(queue, "worker", typed, settings, processes=runner == "processes")):
        await until_stored(connection, queue.name, 0)
    assert {
        sequence: completion["result"] for sequence, completion in (await completions(connection, queue)).items()
    } == {1: "pen 3 1"}
    found = await deaths(connection, queue)
    assert [death.deliveries for death in found] == [1, 1, 1]
    assert {death.error_class for death in found} == {"airflow_provider_jetstream.worker.errors.InvalidBodyError"}
    explanations = [death.explanation or "" for death in found]
    expected = "expected a body that is a valid Order, found: "
    assert explanations[0].startswith(f"{expected}amount: Input should be a valid integer")
    assert explanations[1] == f"{expected}item: Field required"
    assert explanations[2].startswith(f"{expected}body: Invalid JSON")
    assert "s3cret" not in "".join(explanations)


@pytest.mark.slow
async def test_an_async_handler_may_take_a_model_alone(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=LONG_ACK_WAIT)
    orders: list[Order] = []

    async def handle(order: Order) -> None:
        orders.append(order)

    await publish_jobs(connection, queue, ['{"item": "pen"}', "[]"])
    async with running_worker(Worker(queue, "worker", handle, settings)):
        await until_stored(connection, queue.name, 0)
    assert orders == [Order(item="pen", amount=1)]
    assert [death.sequence for death in await deaths(connection, queue)] == [2]


def test_a_handler_that_cannot_run_in_a_process_is_refused(settings: ConnectionSettings, name: str) -> None:
    async def handle(_: Delivery) -> None:
        pass

    queue = small_queue(name)
    with pytest.raises(WorkerSetupError, match="expected a plain function for processes, found an async one"):
        Worker(queue, "worker", handle, settings, processes=True)
    with pytest.raises(WorkerSetupError, match="expected a handler that another process can import"):
        Worker(queue, "worker", lambda _: None, settings, processes=True)
    with pytest.raises(WorkerSetupError, match="expected a handler that another process can import"):
        Worker(queue, "worker", partial(print, handle), settings, processes=True)


# Long jobs: in progress while their handler runs, ended at their deadline, not started once expired.


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """An event for which hanging threads wait; set at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


async def letters(connection: NatsPyConnection, queue: WorkQueue) -> list[tuple[int, Reason, bytes]]:
    scan = await Scan.begin(connection, queue)
    return [(letter.sequence, letter.death.reason, letter.body) async for letter in scan.letters(Selection())]


@pytest.mark.slow
async def test_with_concurrency_one_and_a_slow_handler_no_second_job_is_in_flight(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "400ms", "max_deliver": 3}, jobs="abc")
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
        await until_stored(connection, queue.name, 0)


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
        await until_stored(connection, queue.name, 0)
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
        await until_stored(connection, queue.name, 0)
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
        await until_stored(connection, queue.name, 0)
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
        await until_stored(connection, queue.name, 0)
    # The worker may have been stopped after it had stored the record, and another kind of worker done the job.
    found = await find_dead_letters(connection, queue)
    assert (found.letters, [job.status for job in found.dismissed]) == ((), [Status.UNACCOUNTED])
    (letter,) = (await find_dead_letters(connection, queue, Selection(unaccounted=True))).letters
    assert (letter.death.reason, letter.body) == (Reason.EXPIRED, b"late")


# Stopping and lost leaders: no job is lost or needlessly repeated, and there is no busy loop.


@pytest.fixture
def cluster() -> Iterator[NatsCluster]:
    """A cluster that the test may kill and restart."""
    with NatsCluster() as servers:
        yield servers


@pytest.mark.slow
async def test_jobs_that_arrive_after_the_stop_are_handed_back_and_not_pulled_again_by_the_same_worker(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 2})
    jobs: list[Delivery] = []
    worker = Worker(queue, "worker", jobs.append, settings, concurrency=5)
    async with running_worker(worker):
        await eventually(lambda: waiting_pulls(connection, name))
        worker.stop()
        # The open pull request fetches them.
        await publish_jobs(connection, queue, "abc")
    assert jobs == []
    info = await consumer_info(connection, name, "worker")
    assert info["delivered"]["consumer_seq"] <= 3
    async with running_worker(Worker(queue, "worker", jobs.append, settings, concurrency=5)):
        await eventually(lambda: len(jobs) == 3, within=3)
    assert {job.attempt for job in jobs} <= {1, 2}


@pytest.mark.slow
async def test_a_worker_that_its_handler_stops_pulls_no_other_job(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 1}, jobs="abc")
    jobs: list[bytes] = []

    async def handle(job: Delivery) -> None:
        jobs.append(job.body)
        worker.stop()

    worker = Worker(queue, "worker", handle, settings)
    async with running_worker(worker) as working:
        await eventually(working.done)
    assert jobs == [b"a"]
    assert (await consumer_info(connection, name, "worker"))["delivered"]["consumer_seq"] == 1


@pytest.mark.slow
async def test_a_job_that_arrives_after_the_stop_on_its_last_delivery_is_run_rather_than_handed_back(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 1})
    jobs: list[bytes] = []
    worker = Worker(queue, "worker", lambda job: jobs.append(job.body), settings, concurrency=5)
    async with running_worker(worker):
        await eventually(lambda: waiting_pulls(connection, name))
        worker.stop()
        await publish_jobs(connection, queue, "a")
    async with running_worker(Worker(queue, "worker", lambda job: jobs.append(job.body), settings)):
        await eventually(lambda: jobs == [b"a"])
    assert await stored_count(connection, f"{name}-dead") == 0


@pytest.mark.slow
async def test_after_the_grace_time_a_cancelled_job_is_redelivered_at_once_and_one_in_a_thread_is_not(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 3})
    started, release = threading.Event(), threading.Event()

    async def hang(_: Delivery) -> None:
        started.set()
        await asyncio.sleep(60)

    def hang_in_thread(_: Delivery) -> None:
        started.set()
        release.wait(60)

    await publish_jobs(connection, queue, ["a"])
    async with running_worker(Worker(queue, "worker", hang, settings, grace=0.1)):
        await eventually(started.is_set)
    info = await consumer_info(connection, name, "worker")
    assert (info["num_ack_pending"], info["delivered"]["consumer_seq"]) == (1, 1)
    started.clear()
    try:
        async with running_worker(Worker(queue, "worker", hang_in_thread, settings, grace=0.1)):
            # Sooner than the ack wait of thirty seconds.
            await eventually(started.is_set, within=3)
        attempts: list[int] = []
        async with running_worker(Worker(queue, "worker", lambda job: attempts.append(job.attempt), settings)):
            await asyncio.sleep(1.5)
            # The handler may still run, and its worker couldn't end it.
            assert attempts == []
    finally:
        release.set()


@pytest.mark.slow
async def test_many_threads_that_go_on_after_the_stop_raise_no_error(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 3})
    release = threading.Event()
    jobs: list[int] = []

    def hang(job: Delivery) -> None:
        jobs.append(job.sequence)
        release.wait(60)

    await publish_jobs(connection, queue, map(str, range(15)))
    try:
        async with running_worker(Worker(queue, "worker", hang, settings, concurrency=15, grace=0.1)):
            await eventually(lambda: len(jobs) == 15)
    finally:
        release.set()
    assert (await consumer_info(connection, name, "worker"))["num_ack_pending"] == 15


@pytest.mark.slow
async def test_an_async_handler_that_ignores_its_cancellation_does_not_block_the_next_job(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 1})
    release = asyncio.Event()
    done: list[bytes] = []

    async def stubborn(job: Delivery) -> None:
        while job.body == b"stubborn" and not release.is_set():
            try:
                await asyncio.wait_for(release.wait(), 60)
            except asyncio.CancelledError:
                continue
        done.append(job.body)

    await publish_jobs(connection, queue, ["stubborn", "next"])
    async with running_worker(Worker(queue, "worker", stubborn, settings, deadline=0.2)):
        await eventually(lambda: done == [b"next"])
        release.set()
        await eventually(lambda: len(done) == 2)


@pytest.mark.slow
async def test_when_leaders_are_lost_no_job_is_lost_and_requests_are_not_repeated_in_a_busy_loop(
    cluster: NatsCluster, name: str
) -> None:
    settings = connection_settings({"servers": cluster.urls, "timeout": 10})
    async with connect(settings) as connection:
        queue = await make_queue(
            connection, name, consumer={"ack_wait": "2s", "max_deliver": 10}, num_replicas=3, archive=False
        )
        await asyncio.to_thread(cluster.wait_settled, name)
        jobs: list[int] = []
        pulls: list[float] = []

        async def handle(job: Delivery) -> None:
            await asyncio.sleep(0.02)
            jobs.append(job.sequence)

        async def count(_: Msg) -> None:
            pulls.append(asyncio.get_running_loop().time())

        await connection.client.subscribe(f"$JS.API.CONSUMER.MSG.NEXT.{name}.worker", cb=count)
        async with running_worker(Worker(queue, "worker", handle, settings, concurrency=4)):
            await publish_jobs(connection, queue, map(str, range(300)))
            await eventually(lambda: len(jobs) > 20)
            leader = await asyncio.to_thread(cluster.consumer_leader, name, "worker")
            cluster.kill(leader)
            # The client may have been connected to the killed server.
            await eventually(lambda: connection.client.is_connected, within=20)

            async def empty() -> bool:
                # A request during an election may never be answered.
                with suppress(TransientError):
                    return not await stored_count(connection, name)
                return False

            await eventually(empty, within=60)
            await asyncio.to_thread(cluster.restart, leader)
            before = len(pulls)
            await asyncio.sleep(3)
            # About one request a second while the worker is idle.
            assert 1 <= len(pulls) - before < 10
        assert set(jobs) == set(range(1, 301))
        repeated = {sequence: times for sequence, times in Counter(jobs).items() if times > 1}
        # Only jobs in flight when the leader was lost may have run twice.
        assert len(repeated) <= 8
        assert await completion_count(connection, name) == 300


async def waiting_pulls(connection: NatsPyConnection, name: str) -> int:
    return int((await consumer_info(connection, name, "worker"))["num_waiting"])
