"""The trigger of waiting tasks, beside what Airflow does to it at bad moments."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest
from airflow_steps import process_jobs, provisioned
from dags.waiting import queue as one_chance
from trigger_steps import completion_trigger, event_of, recreated

from airflow_provider_jetstream.jetstream.contract import cancellation_filter
from airflow_provider_jetstream.jetstream.waiting.cursor import take_cursor
from airflow_provider_jetstream.triggers import early_fire_guard as holding
from testbed.dead_letters import stream_messages
from testbed.queues import eventually

if TYPE_CHECKING:
    from pytest_mock import MockerFixture

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

pytestmark = pytest.mark.usefixtures("own_connections")


@pytest.fixture
async def queue(settings: ConnectionSettings, name: str) -> WorkQueue:
    return await provisioned(settings, one_chance(name))


@pytest.mark.parametrize("gap", [1, 4, 8, 12])
async def test_jobs_that_end_between_the_deferral_and_the_start_of_the_trigger_are_not_missed(
    connection: Connection, settings: ConnectionSettings, queue: WorkQueue, gap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL", "0")
    monkeypatch.setattr(holding, "SHORTEST_MARGIN", 0.0)
    monkeypatch.setattr(holding, "LONGEST_MARGIN", 0.5)
    trigger = await completion_trigger(connection, queue, 3, deferred_at=time.time() - gap)
    await process_jobs(settings, queue, 2)
    # Where others wait already, and have read all that is stored.
    others = asyncio.create_task(event_of(await completion_trigger(connection, queue, 1)))
    running = asyncio.create_task(event_of(recreated(trigger)))
    await process_jobs(settings, queue, 2)
    assert (await running)["report"]["completed_sequences"] == [[1, 3]]
    assert (await others)["report"]["completed_sequences"] == [[4, 4]]


async def test_cancelling_the_jobs_of_an_ended_task_outlives_the_trigger(
    connection: Connection, queue: WorkQueue, mocker: MockerFixture
) -> None:
    asked = asyncio.Event()

    async def ask_a_slow_airflow(_: object) -> bool:
        asked.set()
        await asyncio.sleep(0.2)
        return True

    mocker.patch("airflow_provider_jetstream.triggers.completion.was_ended", ask_a_slow_airflow)
    mark = await take_cursor(connection, queue)
    jobs = await put_with_ids(connection, queue, 3)
    trigger = await completion_trigger(
        connection, queue, 1, mark=asdict(mark), sequences=[[jobs[0], jobs[-1]]], cancel_on_kill=True
    )
    killing = asyncio.create_task(trigger.on_kill())
    await asked.wait()
    # As Airflow does that has cancelled it a second ago.
    killing.cancel()
    await asyncio.wait([killing])
    assert killing.cancelled()

    async def all_are_cancelled() -> bool:
        return len(await stream_messages(connection, f"{queue.name}_events", cancellation_filter(queue.name))) == 3

    await eventually(all_are_cancelled)


async def put_with_ids(connection: Connection, queue: WorkQueue, count: int) -> list[int]:
    publish = connection.client.jetstream().publish
    return [(await publish(queue.name, b"", headers={"Job-Id": f"job-{number}"})).seq for number in range(count)]
