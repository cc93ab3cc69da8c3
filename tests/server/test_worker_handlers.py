"""Handlers in processes, and handlers that take the body as a pydantic model."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from process_handlers import Order, fail, hang_with_child_process, process_id, typed

from airflow_provider_jetstream.worker import Delivery, Worker
from airflow_provider_jetstream.worker.errors import WorkerSetupError
from testbed.face import next_message, read_record
from testbed.queues import eventually, make_queue, publish_jobs, running_worker, small_queue, stored_count

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import ConnectionSettings, Death, WorkQueue
    from testbed.face import NatsPyConnection

LONG_ACK_WAIT = {"ack_wait": "30s", "max_deliver": 2}


def settled(connection: NatsPyConnection, queue: WorkQueue, left: int = 0) -> Callable[[], Any]:
    async def has_count() -> bool:
        return await stored_count(connection, queue.name) == left

    return has_count


async def completions(connection: NatsPyConnection, queue: WorkQueue) -> dict[int, dict[str, Any]]:
    completed: dict[int, dict[str, Any]] = {}
    start = 1
    while message := await next_message(connection, f"{queue.name}-events", start, f"completed.{queue.name}.>"):
        completion = json.loads(message.data)
        completed[completion["stream_seq"]] = completion
        start = message.sequence + 1
    return completed


async def deaths(connection: NatsPyConnection, queue: WorkQueue) -> list[Death]:
    found: list[Death] = []
    start = 1
    while message := await next_message(connection, f"{queue.name}-dead", start, f"dead.{queue.name}.>"):
        record = read_record(message, queue.name)
        assert record is not None
        found.append(record[0])
        start = message.sequence + 1
    return found


def children() -> set[int]:
    processes = psutil.Process().children()
    return {process.pid for process in processes if "spawn_main" in " ".join(process.cmdline())}


@pytest.mark.slow
async def test_processes_share_the_jobs_and_exit_with_the_worker(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=LONG_ACK_WAIT)
    await publish_jobs(connection, queue, map(str, range(12)))
    async with running_worker(Worker(queue, "worker", process_id, settings, concurrency=3, processes=True)):
        await eventually(settled(connection, queue), within=20)
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
        await eventually(settled(connection, queue, 2), within=20)

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
        await eventually(settled(connection, queue), within=20)
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
        await eventually(settled(connection, queue), within=3)


@pytest.mark.slow
async def test_handler_processes_ignore_signals_to_the_process_group(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=LONG_ACK_WAIT)
    await publish_jobs(connection, queue, ["a"])
    async with running_worker(Worker(queue, "worker", process_id, settings, processes=True)):
        await eventually(settled(connection, queue))
        (child,) = children()
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(child, number)
        await publish_jobs(connection, queue, ["b"])
        await eventually(settled(connection, queue))
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
        await eventually(settled(connection, queue))
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
        await eventually(settled(connection, queue))
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
