"""The result of a redrive that waited says what the audit and the page say of it, in this process."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from airflow_steps import process_jobs, provisioned
from dags.redrives import queue as queue_of
from test_airflow_redrive_operator import context, make_letters, operator, run

from airflow_provider_jetstream.jetstream import WorkQueue, list_redrives
from testbed import seams
from testbed.deferral import TaskDeferred

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import Connection, ConnectionSettings

pytestmark = pytest.mark.usefixtures("own_connections")

WAITING: dict[str, Any] = {"wait_for_completion": True, "wait_timeout": timedelta(seconds=60), "max_dead": None}
FIELDS = ("state", "reason", "outcomes", "redriven", "parked", "failed")


@pytest.fixture(autouse=True)
def _ready_airflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """No event waits for an Airflow that isn't ready for it: there is none here."""
    monkeypatch.setattr(seams.EARLY_FIRE_GUARD_LONGEST_MARGIN, 0.0)
    monkeypatch.setattr(seams.EARLY_FIRE_GUARD_EXIT_NOTICE_SECONDS, lambda: 0.0)


@pytest.fixture
async def queue(settings: ConnectionSettings, name: str) -> WorkQueue:
    return await provisioned(settings, queue_of(name))


async def _said_by_the_audit(connection: Connection, queue: WorkQueue) -> dict[str, Any]:
    (redrive, *_) = await list_redrives(connection, queue)
    return {name: value for name, value in redrive.model_dump(mode="json").items() if name in FIELDS}


def _said_by(result: dict[str, Any]) -> dict[str, Any]:
    return {name: result[name] for name in FIELDS}


def _ended(**outcomes: int) -> dict[str, Any]:
    none = {"completed": 0, "died_again": 0, "still_running": 0, "unknown": 0}
    return {"state": "finished", "reason": "", "outcomes": none | outcomes, "parked": 0, "failed": 0}


@pytest.mark.slow
async def test_so_it_is_after_a_deferral(
    connection: Connection, settings: ConnectionSettings, queue: WorkQueue
) -> None:
    await make_letters(settings, queue, b"one", b"two")
    waiting = WAITING | {"deferrable": True, "defer_after": 0.01}
    with pytest.raises(TaskDeferred) as deferred:
        await run(queue, **waiting)
    await process_jobs(settings, queue, 1, fail=True)
    await process_jobs(settings, queue, 1)
    event = json.loads(json.dumps((await anext(deferred.value.trigger.run())).payload))
    result = await asyncio.to_thread(operator(queue, **waiting).execute_complete, context(1), event)
    assert _said_by(result) == _ended(completed=1, died_again=1) | {"redriven": 2}
    assert _said_by(result) == await _said_by_the_audit(connection, queue)


async def test_so_it_is_in_waves_and_in_an_order(
    connection: Connection, settings: ConnectionSettings, queue: WorkQueue
) -> None:
    await make_letters(settings, queue, b"one")
    task = asyncio.create_task(run(queue, waves=["rest"], deferrable=False, stop_when=1, wait_timeout="60s"))
    await process_jobs(settings, queue, 1, fail=True)
    result = await task
    assert _said_by(result)["outcomes"] == _ended(died_again=1)["outcomes"]
    assert _said_by(result) == await _said_by_the_audit(connection, queue)
    ordered = {"order_key": "subject:2", "deferrable": False, **WAITING}
    task = asyncio.create_task(run(queue, try_number=2, **ordered))
    await process_jobs(settings, queue, 1)
    result = await task
    assert _said_by(result) == _ended(completed=1) | {"redriven": 1} == await _said_by_the_audit(connection, queue)


async def test_an_end_that_was_recorded_before_is_the_tasks_too(
    connection: Connection, settings: ConnectionSettings, queue: WorkQueue
) -> None:
    # The task was killed between the record of the end and its return, and the trigger's event comes once more.
    await make_letters(settings, queue, b"one")
    waiting = WAITING | {"deferrable": True, "defer_after": 0.01}
    with pytest.raises(TaskDeferred) as deferred:
        await run(queue, **waiting)
    await process_jobs(settings, queue, 1, fail=True)
    event = (await anext(deferred.value.trigger.run())).payload
    results = [await asyncio.to_thread(operator(queue, **waiting).execute_complete, context(1), event) for _ in "ab"]
    assert _said_by(results[0]) == _said_by(results[1]) == await _said_by_the_audit(connection, queue)
