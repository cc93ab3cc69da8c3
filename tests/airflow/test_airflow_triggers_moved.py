"""Many tasks wait while their triggerer is killed, stands still, is stopped, and works beside another one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from airflow_steps import log_text, provisioned, wait_for
from dags.interrupted_waits import TASKS, queue

from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.contract import cancellation_filter, completion_filter
from testbed.dead_letters import stream_messages
from testbed.queues import pull_jobs, store_completion

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
    from testbed.airflow import Airflow

RUN = "moving"
BESIDE = "beside"
PATIENCE = 60.0 + 2 * TASKS


@pytest.fixture
def one_triggerer_afterwards(airflow: Airflow) -> Iterator[None]:
    """Leave a running triggerer to the other tests, however this one ends."""
    yield
    if "triggerer" in airflow.pids():
        send(airflow, "triggerer", signal.SIGCONT)
    if BESIDE in airflow.pids():
        airflow.kill_triggerer(BESIDE)
    if "triggerer" not in airflow.pids():
        airflow.start_triggerer()


def states(airflow: Airflow) -> Counter[str]:
    return Counter(task["state"] for task in airflow.task_instances("moving", RUN))


def send(airflow: Airflow, name: str, number: signal.Signals) -> None:
    for pid in airflow.pids()[name]:
        os.kill(pid, number)


def killed(airflow: Airflow) -> int:
    """Count the tasks of which a trigger was told that it was killed."""
    told = "Trigger cancelled by user action, invoking on_kill"
    return sum(told in log_text(airflow, "moving", RUN, "moving", 1, number) for number in range(TASKS))


async def do(connection: Connection, count: int) -> None:
    for message in await pull_jobs(connection, queue("moving"), count, within=120):
        await store_completion(connection, queue("moving"), message.metadata.sequence.stream)
        await message.ack_sync()


def move(airflow: Airflow, work: list[int], settings: ConnectionSettings) -> None:
    """Do some jobs after each thing that befalls the triggerers."""

    def do_next() -> None:
        async def doing() -> None:
            async with connect(settings) as connection:
                await do(connection, work.pop(0))

        asyncio.run(doing())

    def wait_for_waiting() -> None:
        wait_for(lambda: states(airflow)["deferred"] == sum(work), f"{sum(work)} waiting tasks", PATIENCE)

    airflow.kill_triggerer()
    do_next()
    assert states(airflow) == {"deferred": TASKS}
    airflow.start_triggerer()
    wait_for_waiting()

    airflow.start_triggerer(BESIDE)
    send(airflow, "triggerer", signal.SIGSTOP)
    do_next()
    wait_for_waiting()
    # Two have the same triggers now, and the first learns only afterwards that they were taken from it.
    send(airflow, "triggerer", signal.SIGCONT)
    # Some have their event already and only hold it back.
    wait_for(lambda: killed(airflow) > sum(work) // 2, "triggers that were killed for moving", PATIENCE)
    do_next()
    wait_for_waiting()

    airflow.stop_triggerer(BESIDE)
    do_next()


@pytest.mark.usefixtures("one_triggerer_afterwards")
async def test_all_succeed_at_the_first_try_and_no_job_is_cancelled(
    airflow: Airflow, settings: ConnectionSettings
) -> None:
    await provisioned(settings, queue("moving"))
    airflow.wait_for_dags("moving")
    airflow.trigger("moving", run_id=RUN)
    everyone = f"{TASKS} waiting tasks"
    await asyncio.to_thread(wait_for, lambda: states(airflow)["deferred"] == TASKS, everyone, PATIENCE)
    part = TASKS // 4
    await asyncio.to_thread(move, airflow, [part, part, part, TASKS - 3 * part], settings)
    async with connect(settings) as connection:
        run = await asyncio.to_thread(airflow.wait_for_run, "moving", RUN, PATIENCE)
        assert run["state"] == "success"
        assert await stream_messages(connection, "moving_events", cancellation_filter("moving")) == []
        assert len(await stream_messages(connection, "moving_events", completion_filter("moving"))) == TASKS
    tasks = airflow.task_instances("moving", RUN)
    assert Counter((task["state"], task["try_number"]) for task in tasks) == {("success", 1): TASKS}
