"""The triggers without Airflow's processes, on a real server: their serialized form and their events."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from airflow.sdk.exceptions import TaskDeferred
from airflow_steps import process_jobs, provisioned, wait_for
from dags.waiting import queue as queue_of
from trigger_steps import LONG_AGO, completion_trigger, event_of, recreated

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream import connect, wait
from airflow_provider_jetstream.jetstream.errors import ApiError
from airflow_provider_jetstream.sensors.dead_letter import JetStreamDeadLetterSensor
from airflow_provider_jetstream.triggers.dead_letter import DeadLetterTrigger
from testbed import seams
from testbed.queues import pull_jobs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from airflow_steps import Secrets
    from pytest_mock import MockerFixture

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

pytestmark = pytest.mark.usefixtures("own_connections")


@pytest.fixture
async def queue(settings: ConnectionSettings, name: str) -> WorkQueue:
    return await provisioned(settings, queue_of(name))


async def test_two_copies_at_once_and_a_later_one_fire_the_same_event(
    connection: NatsPyConnection, settings: ConnectionSettings, queue: WorkQueue
) -> None:
    trigger = await completion_trigger(connection, queue, 3)
    running = [asyncio.create_task(event_of(copy)) for copy in (trigger, recreated(trigger))]
    await process_jobs(settings, queue, 3)
    first, second = await asyncio.gather(*running)
    late = await event_of(recreated(trigger))
    assert first == second == late
    assert first["status"] == "ended"
    assert first["summary"] == {"published": 3}
    assert (first["report"]["completed"], first["report"]["completed_sequences"]) == (3, [[1, 3]])


@pytest.mark.slow
async def test_the_deadline_fires_an_event_with_the_missing_jobs(
    connection: NatsPyConnection, settings: ConnectionSettings, queue: WorkQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.COMPLETION_MINIMUM_SECONDS, 1.0)
    trigger = await completion_trigger(connection, queue, 5, deadline=time.time() + 1)
    await process_jobs(settings, queue, 2)
    event = await event_of(trigger)
    assert (event["status"], event["handle"], event["missing"]) == ("timeout", trigger.handle.as_json(), [[3, 5]])
    assert event["report"]["completed"] == 2


async def test_a_wrong_password_fires_an_error_that_does_not_contain_it(
    connection: NatsPyConnection, queue: WorkQueue, secrets: Secrets
) -> None:
    event = await event_of(await completion_trigger(connection, queue, 1, nats_conn_id="nats_wrong_password"))
    assert event["status"] == "error"
    assert event["message"].startswith("JS102 connection 'nats_wrong_password': nats://")
    assert not any(secret in json.dumps(event) for secret in secrets.all())


@pytest.mark.slow
async def test_the_trigger_waits_while_the_server_is_away(
    own_nats: NatsServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fields = {"conn_type": "nats", "host": "127.0.0.1", "port": own_nats.port, "extra": {"timeout": 2}}
    monkeypatch.setenv("AIRFLOW_CONN_NATS_OWN", json.dumps(fields))
    settings = await JetStreamHook("nats_own").asettings()
    queue = await provisioned(settings, queue_of(name))
    async with connect(settings) as connection:
        trigger = await completion_trigger(connection, queue, 2, nats_conn_id="nats_own")
    own_nats.kill()
    running = asyncio.create_task(event_of(trigger))
    own_nats.start()
    await process_jobs(settings, queue, 1)
    own_nats.restart()
    await process_jobs(settings, queue, 1)
    assert (await running)["report"]["completed"] == 2


async def test_a_transient_refusal_is_retried(
    connection: NatsPyConnection, settings: ConnectionSettings, queue: WorkQueue, mocker: MockerFixture
) -> None:
    mocker.patch(seams.COMPLETION_RETRY_SECONDS, 0.1)

    def refused_once(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        # A cluster answers so while it elects a leader, which a single server never does.
        refusals = [ApiError(503, 10008, "JetStream system temporarily unavailable", "STREAM.MSG.GET")]

        async def refuse_or_call(*args: Any, **kwargs: Any) -> Any:
            if refusals:
                raise refusals.pop()
            return await call(*args, **kwargs)

        return refuse_or_call

    mocker.patch(seams.COMPLETION_WAIT, refused_once(wait))
    mocker.patch.object(JetStreamHook, "ascan_dead_letters", refused_once(JetStreamHook.ascan_dead_letters))
    trigger = await completion_trigger(connection, queue, 1)
    await process_jobs(settings, queue, 1, fail=True)
    assert (await event_of(trigger))["report"]["dead"] == 1
    assert (await event_of(dead_letter_trigger(queue, min_count=1)))["found"]["dead"] == 1


@pytest.mark.slow
async def test_all_triggers_of_a_process_share_one_connection(
    connection: NatsPyConnection, settings: ConnectionSettings, queue: WorkQueue, nats: NatsServer
) -> None:
    triggers = [await completion_trigger(connection, queue, 1) for _ in range(20)]
    before = nats.monitor("connz")["num_connections"]
    running = [asyncio.create_task(event_of(trigger)) for trigger in triggers]

    def subscriptions() -> list[int]:
        return [client["subscriptions"] for client in nats.monitor("connz?subs=1")["connections"]]

    # However many triggers there are: one for answers, and one for each of the three streams that all follow together.
    await asyncio.to_thread(wait_for, lambda: max(subscriptions()) == 4, "their subscriptions")
    assert len(subscriptions()) == before + 1
    await process_jobs(settings, queue, 20)
    assert {event["status"] for event in await asyncio.gather(*running)} == {"ended"}


@pytest.mark.slow
async def test_an_event_is_delayed_until_airflow_is_ready_for_it(
    connection: NatsPyConnection, settings: ConnectionSettings, queue: WorkQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The supervisor of a task may notice its end this much later; the scheduler needs the margin after that.
    monkeypatch.setenv("AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL", "1")
    monkeypatch.setattr(seams.EARLY_FIRE_GUARD_SHORTEST_MARGIN, 0.5)
    monkeypatch.setattr(seams.EARLY_FIRE_GUARD_LONGEST_MARGIN, 0.5)
    trigger = await completion_trigger(connection, queue, 1, deferred_at=time.time())
    await process_jobs(settings, queue, 1)
    started = time.monotonic()
    await event_of(trigger)
    assert time.monotonic() - started >= 1.5


def dead_letter_trigger(queue: WorkQueue, **kwargs: Any) -> DeadLetterTrigger:
    arguments = {
        "nats_conn_id": "nats_default",
        "work_queue": queue.model_dump(mode="json", exclude_unset=True),
        "min_count": 2,
        "poll_interval": 0.2,
        "deferred_at": time.time() - LONG_AGO,
    }
    return DeadLetterTrigger(**{**arguments, **kwargs})


@pytest.mark.slow
async def test_a_dead_letter_trigger_waits_until_a_letter_is_old_enough(
    settings: ConnectionSettings, connection: NatsPyConnection, queue: WorkQueue
) -> None:
    await connection.client.jetstream().publish(queue.name, b"job")
    await process_jobs(settings, queue, 1, fail=True)
    trigger = dead_letter_trigger(queue, min_count=1, older_than=1.5)
    assert recreated(trigger).serialize() == trigger.serialize()
    summary = (await event_of(trigger))["found"]
    assert summary["oldest_age_seconds"] >= 1.5
    assert summary["groups"] == []


@pytest.mark.slow
async def test_a_dead_letter_trigger_waits_for_enough_of_one_group(
    settings: ConnectionSettings, connection: NatsPyConnection, queue: WorkQueue
) -> None:
    trigger = dead_letter_trigger(queue, min_count=2, group_by=["error_class"], select={"consumer": "worker"})
    assert recreated(trigger).serialize() == trigger.serialize()
    for _ in range(3):
        await connection.client.jetstream().publish(queue.name, b"job")
    # This one dies without an explanation.
    (dead,) = await pull_jobs(connection, queue, 1)
    await dead.nak()
    await process_jobs(settings, queue, 1, fail=True)
    running = asyncio.create_task(event_of(trigger))
    done, _ = await asyncio.wait([running], timeout=0.5)
    assert not done
    await process_jobs(settings, queue, 1, fail=True)
    groups = (await running)["found"]["groups"]
    assert [(group["group"], group["count"]) for group in groups] == [
        ({"error_class": "ValueError"}, 2),
        ({"error_class": None}, 1),
    ]


async def test_a_sensor_looks_before_it_defers_only_at_few_entries(
    settings: ConnectionSettings, connection: NatsPyConnection, queue: WorkQueue, mocker: MockerFixture
) -> None:
    mocker.patch(seams.EARLY_FIRE_GUARD_LONGEST_MARGIN, 0.0)
    mocker.patch(seams.EARLY_FIRE_GUARD_EXIT_NOTICE_SECONDS, return_value=0.0)
    await connection.client.jetstream().publish(queue.name, b"job")
    await process_jobs(settings, queue, 1, fail=True)
    sensor = JetStreamDeadLetterSensor(task_id="sense", work_queue=queue, deferrable=True, timeout=60)
    found = await asyncio.to_thread(sensor.execute, {})
    assert found["dead"] == 1
    # As at a queue with thousands of letters: the triggerer, which knows them, ends the wait.
    mocker.patch(seams.DEAD_LETTER_FEW_ENTRIES, 0)
    with pytest.raises(TaskDeferred) as deferred:
        await asyncio.to_thread(sensor.execute, {})
    assert (await event_of(deferred.value.trigger))["found"]["sequences"] == found["sequences"]
