"""Tasks wait while their triggers move: their triggerer is killed, suspended, stopped, and replaced by another."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from airflow_steps import log_text, provisioned, wait_for
from dags.interrupted_waits import TASKS, queue

from airflow_provider_jetstream.jetstream import connect
from airflow_provider_jetstream.jetstream.contract import cancellation_filter, completion_filter
from testbed.dead_letters import stream_messages
from testbed.queues import pull_jobs, store_completion

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.airflow import Airflow
    from testbed.face import NatsPyConnection

RUN = "moving"
SECOND = "second-triggerer"
TIMEOUT = 60.0 + 2 * TASKS


@pytest.fixture
def one_triggerer_afterwards(airflow: Airflow) -> Iterator[None]:
    """Leave one running triggerer to the other tests."""
    yield
    if "triggerer" in airflow.pids():
        send(airflow, "triggerer", signal.SIGCONT)
    if SECOND in airflow.pids():
        airflow.kill_triggerer(SECOND)
    if "triggerer" not in airflow.pids():
        airflow.start_triggerer()


def states(airflow: Airflow) -> Counter[str]:
    return Counter(task["state"] for task in airflow.task_instances("moving", RUN))


def send(airflow: Airflow, name: str, number: signal.Signals) -> None:
    for pid in airflow.pids()[name]:
        os.kill(pid, number)


def killed_count(airflow: Airflow) -> int:
    """Count the tasks of which Airflow called a trigger's on_kill."""
    line = "Trigger cancelled by user action, invoking on_kill"
    return sum(line in log_text(airflow, "moving", RUN, "moving", 1, number) for number in range(TASKS))


async def complete(connection: NatsPyConnection, count: int) -> None:
    for message in await pull_jobs(connection, queue("moving"), count, within=120):
        await store_completion(connection, queue("moving"), message.metadata.sequence.stream)
        await message.ack_sync()


def move(airflow: Airflow, counts: list[int], settings: ConnectionSettings) -> None:
    """Move the triggers in several ways, and complete so many jobs after each."""

    def complete_next() -> None:
        async def connect_and_complete() -> None:
            async with connect(settings) as connection:
                await complete(connection, counts.pop(0))

        asyncio.run(connect_and_complete())

    def wait_for_waiting() -> None:
        wait_for(lambda: states(airflow)["deferred"] == sum(counts), f"{sum(counts)} waiting tasks", TIMEOUT)

    airflow.kill_triggerer()
    complete_next()
    assert states(airflow) == {"deferred": TASKS}
    airflow.start_triggerer()
    wait_for_waiting()

    airflow.start_triggerer(SECOND)
    send(airflow, "triggerer", signal.SIGSTOP)
    complete_next()
    wait_for_waiting()
    # Both have the same triggers now; the first one finds out only later that they were taken from it.
    send(airflow, "triggerer", signal.SIGCONT)
    # Some triggers have their event already and only delay it.
    wait_for(lambda: killed_count(airflow) > sum(counts) // 2, "triggers that were killed since they moved", TIMEOUT)
    complete_next()
    wait_for_waiting()

    airflow.stop_triggerer(SECOND)
    complete_next()


@pytest.mark.usefixtures("one_triggerer_afterwards")
async def test_all_tasks_succeed_at_the_first_try_and_no_job_is_cancelled(
    airflow: Airflow, settings: ConnectionSettings
) -> None:
    await provisioned(settings, queue("moving"))
    airflow.wait_for_dags("moving")
    airflow.trigger("moving", run_id=RUN)
    await asyncio.to_thread(wait_for, lambda: states(airflow)["deferred"] == TASKS, f"{TASKS} waiting tasks", TIMEOUT)
    quarter = TASKS // 4
    await asyncio.to_thread(move, airflow, [quarter, quarter, quarter, TASKS - 3 * quarter], settings)
    async with connect(settings) as connection:
        run = await asyncio.to_thread(airflow.wait_for_run, "moving", RUN, TIMEOUT)
        assert run["state"] == "success"
        assert await stream_messages(connection, "moving_events", cancellation_filter("moving")) == []
        assert len(await stream_messages(connection, "moving_events", completion_filter("moving"))) == TASKS
    tasks = airflow.task_instances("moving", RUN)
    assert Counter((task["state"], task["try_number"]) for task in tasks) == {("success", 1): TASKS}
