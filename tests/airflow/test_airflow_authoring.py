"""Tasks that plan, wait for room, keep to a rate, publish once for a key, and cancel."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from airflow_steps import log_text, provisioned, succeeded
from dags.authoring import CROWDED, ONCE

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream import WorkQueue, connect
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from testbed.face import consumer_info, stream_info
from testbed.queues import eventually, pull_jobs, store_completion

if TYPE_CHECKING:
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import Connection, ConnectionSettings
    from testbed.airflow import Airflow

RUN = "authoring.1"


@pytest.fixture(scope="module", autouse=True)
def runs(airflow: Airflow, settings: ConnectionSettings) -> None:
    """Start all runs at once."""
    airflow.wait_for_dags("authoring", "cancelling", "publish_once")
    asyncio.run(provisioned(settings, ONCE))
    for dag in ("authoring", "cancelling", "publish_once"):
        airflow.trigger(dag, run_id=RUN)


async def _is_provisioned(connection: Connection, queue: WorkQueue) -> bool:
    try:
        return bool(await consumer_info(connection, queue.name, "worker"))
    except NotFoundError:
        return False


async def _finish(settings: ConnectionSettings, queue: WorkQueue, count: int) -> list[bytes]:
    """Process jobs one after another as a worker does; each makes room for one."""
    done: list[bytes] = []
    async with connect(settings) as connection:
        await eventually(lambda: _is_provisioned(connection, queue), within=180)
        while len(done) < count:
            for job in await pull_jobs(connection, queue, 1, within=180):
                await store_completion(connection, queue, job.metadata.sequence.stream)
                await job.ack_sync()
                done.append(job.data)
    return done


async def test_jobs_wait_for_room_in_a_full_queue_at_a_rate(airflow: Airflow, settings: ConnectionSettings) -> None:
    done = await _finish(settings, CROWDED, 12)
    assert sorted(done, key=int) == [f"{number}".encode() for number in range(12)]
    await asyncio.to_thread(succeeded, airflow, "authoring", RUN)
    result = airflow.xcom("authoring", RUN, "crowd")
    assert (result["published"], result["duplicates"]) == (12, 0)


async def test_a_dry_run_of_provisioning_returns_the_plan_and_changes_nothing(airflow: Airflow) -> None:
    await asyncio.to_thread(succeeded, airflow, "authoring", RUN)
    first = airflow.xcom("authoring", RUN, "plan_first")
    assert (first["changes"], first["blocked"]) == (3, 0)
    assert [f"{step['action']} {step['kind']} {step['name']}" for step in first["steps"]] == [
        "create stream crowded_events",
        "create stream crowded",
        "create consumer crowded/worker",
    ]
    # What was planned wasn't done: the next task created it.
    assert airflow.xcom("authoring", RUN, "provision")[1] == "create stream crowded"
    assert airflow.xcom("authoring", RUN, "plan_again")["changes"] == 0
    moved = airflow.xcom("authoring", RUN, "plan_moved")
    (step,) = [step for step in moved["steps"] if step["blocked"]]
    assert (moved["blocked"], step["name"]) == (1, "crowded")
    assert "storage: file → memory" in step["differences"]
    assert "storage of a stream is fixed" in step["blocked"][0]
    assert "Nothing was changed." in log_text(airflow, "authoring", RUN, "plan_moved")


async def test_two_runs_with_one_key_publish_once_and_both_wait(
    airflow: Airflow, settings: ConnectionSettings, connection: Connection
) -> None:
    await _finish(settings, ONCE, 3)
    await asyncio.to_thread(succeeded, airflow, "publish_once", RUN)
    await asyncio.to_thread(airflow.trigger, "publish_once", run_id="authoring.2")
    await asyncio.to_thread(succeeded, airflow, "publish_once", "authoring.2")
    first, second = (airflow.xcom("publish_once", run, "once") for run in (RUN, "authoring.2"))
    assert (first["published"], first["duplicates"], first["completed"]) == (3, 0, 3)
    assert (second["published"], second["duplicates"], second["completed"]) == (3, 3, 3)
    assert second["sequences"] == first["sequences"]
    assert (await stream_info(connection, "once"))["state"]["last_seq"] == 3


@pytest.mark.usefixtures("own_connections")
def test_the_hook_plans_discovers_and_publishes_at_a_rate(name: str, tmp_path: Path) -> None:
    hook = JetStreamHook()
    queue = WorkQueue(
        name=name,
        subjects=[f"{name}.>"],
        consumers=[{"name": "worker", "max_deliver": 1}],
        discard="new",
        max_msgs=3,
        max_bytes="1MB",
    )
    assert len(hook.plan(queue).changes) == 2
    with pytest.raises(NotFoundError):
        hook.discover_queue(name)
    hook.provision(queue)
    assert asyncio.run(hook.aplan(queue)).changes == ()
    assert hook.publish(["a", "b"], subject=f"{name}.a", rate=50, room_timeout=1).stored == 2
    path = tmp_path / "queue.yaml"
    path.write_text(hook.discover_queue(name).to_yaml(), encoding="utf-8")
    assert hook.plan(path).changes == ()
    assert WorkQueue.load(path).max_bytes == 2**20
