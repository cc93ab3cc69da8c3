"""The documents' programs start again while jobs run, and take back what an adoption has added: all of it is named."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest
from document_configurations import DOCUMENTS

from airflow_provider_jetstream.jetstream import (
    Job,
    Origin,
    WorkQueue,
    diagnose_dead_letters,
    find_dead_letters,
    provision,
    publish,
    take_cursor,
    wait,
)
from airflow_provider_jetstream.worker import Delivery, Worker
from testbed.foreign_programs import start_program
from testbed.ledger import read_ledger
from testbed.queues import eventually, running_worker, stored_count

if TYPE_CHECKING:
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.face import NatsPyConnection

# By document a subject of its jobs, and what its programs take back.
SUBJECTS = {
    "jobs": ("jobs.high.import", {"republish"}),
    "TASKS": ("tasks.email", {"republish", "max_deliver is -1, declared 5", "sample_freq is unset, declared 100%"}),
    "TASKS in partitions": ("tasks.1.email", {"republish", "max_deliver is -1", "sample_freq is unset"}),
    "TASKS_HIGH": ("tasks.high.email", {"republish", "max_deliver is -1", "sample_freq is unset"}),
    "TASKS_NORMAL": ("tasks.normal.email", {"republish", "max_deliver is -1", "sample_freq is unset"}),
    "orders": ("orders.new", {"republish", "sample_freq is unset, declared 100%"}),
    "IMAGES": ("IMAGES.blackandwhite", {"republish", "sample_freq is unset, declared 100%"}),
}
JOBS = 12


@pytest.mark.slow
@pytest.mark.parametrize("name", list(DOCUMENTS))
async def test_a_restart_in_mid_run_is_named_by_all_who_rely_on_the_queue_and_jobs_are_done_once(
    connection: NatsPyConnection, settings: ConnectionSettings, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    document, (subject, undone) = DOCUMENTS[name], SUBJECTS[name]
    queue = WorkQueue.load(document.path)
    await document.create(connection)
    await provision(connection, queue)
    done: Counter[str] = Counter()
    restarted = asyncio.Event()

    async def process(job: Delivery) -> None:
        if len(done) == JOBS // 2:
            await restarted.wait()
        done[job.body.decode()] += 1

    cursor = await take_cursor(connection, queue)
    assert "isn't as declared" not in caplog.text
    jobs = [Job(str(number), subject) for number in range(JOBS)]
    report = await publish(connection, queue, jobs, origin=Origin("dag", "run", "task", max_tries=1))
    async with AsyncExitStack() as stack:
        for consumer in queue.consumers:
            await stack.enter_async_context(running_worker(Worker(queue, consumer.name, process, settings)))
        await eventually(lambda: len(done) == JOBS // 2)
        await document.restart(connection)
        restarted.set()
        ends = await wait(connection, cursor, report.sequences)
    assert len(ends.completed) == JOBS
    assert done == {str(number): 1 for number in range(JOBS)}
    found = await find_dead_letters(connection, queue)
    text = "\n".join(risk for risk in found.risks if risk.name == "not-as-declared")
    assert "since it was provisioned at" in text
    assert all(part in text for part in undone), text
    diagnosis = (await diagnose_dead_letters(connection, queue)).text
    assert all(part in diagnosis for part in undone)
    # The wait has said so, and publishing does.
    later = [Job("later", subject)]
    await publish(connection, queue, later, origin=Origin("dag", "run", "later", max_tries=1))
    assert "republish is unset" in caplog.text
    assert all(part in caplog.text for part in undone)
    caplog.clear()
    # As the examples do before they work.
    await provision(connection, queue)
    await take_cursor(connection, queue)
    assert "not-as-declared" not in {risk.name for risk in (await find_dead_letters(connection, queue)).risks}
    assert "isn't as declared" not in caplog.text


# The documents give a worker half a minute for each task.
@pytest.mark.slow
async def test_tasks_of_a_worker_that_starts_again_are_done_and_awaited_once_provisioned_before_work(
    connection: NatsPyConnection, tmp_path: Path, program_env: dict[str, str], ledger: Path
) -> None:
    document, queue = DOCUMENTS["TASKS"], WorkQueue.load(DOCUMENTS["TASKS"].path)
    await document.create(connection)
    await provision(connection, queue)
    cursor = await take_cursor(connection, queue)
    report = await publish(connection, queue, [Job(str(number), "tasks.email") for number in range(60)])
    arguments = ("foreign_tasks", "create", "worker")
    first = start_program("first", *arguments, env=program_env, logs=tmp_path)
    try:
        await eventually(lambda: len(read_ledger(ledger)) > 5)
    finally:
        first.kill()
    found = await find_dead_letters(connection, queue)
    assert "never becomes a dead letter" in "".join(found.risks)
    assert not found.letters
    await provision(connection, queue)
    second = start_program("second", *arguments, env=program_env, logs=tmp_path)
    try:
        ends = asyncio.create_task(wait(connection, cursor, report.sequences))
        # What the kill left in flight comes back after the ack wait: a poison task is dead after 5 deliveries again.
        await eventually(lambda: len({line["task"] for line in read_ledger(ledger)}) >= 50, within=60)
        await provision(connection, queue)
        await eventually(ends.done, within=90)
    finally:
        second.terminate()
    assert len((await ends).completed) == 60
    assert await stored_count(connection, "TASKS") == 0
    assert {line["task"] for line in read_ledger(ledger)} == {str(number) for number in range(60)}
