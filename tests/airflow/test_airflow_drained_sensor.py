"""The sensor succeeds when the queue is drained and not before, in every mode."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from airflow_steps import log_text, process_jobs, provisioned, task_states, wait_for_states
from dags.drained import DRAINING, UNDRAINED
from trigger_steps import LONG_AGO, event_of, recreated

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream import connect, redrive_dead_letters
from airflow_provider_jetstream.sensors.queue import JetStreamQueueDrainedSensor
from airflow_provider_jetstream.triggers.queue import QueueDrainedTrigger
from testbed.queues import make_queue, publish_jobs, pull_jobs, small_queue

if TYPE_CHECKING:
    from airflow_steps import Secrets
    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from testbed.airflow import Airflow
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer


@pytest.fixture(scope="module")
def undrained(airflow: Airflow, settings: ConnectionSettings) -> str:
    async def publish() -> None:
        await provisioned(settings, UNDRAINED)
        async with connect(settings) as connection:
            # It matches no consumer's filter.
            await connection.client.jetstream().publish("undrained.b", b"job")

    asyncio.run(publish())
    airflow.wait_for_dags("undrained")
    return airflow.trigger("undrained")


async def prolong(job: Msg) -> None:
    """Prolong a job's ack wait, however long Airflow takes."""
    while True:
        await job.in_progress()
        await asyncio.sleep(1)


async def test_the_sensor_waits_until_the_queue_is_drained(
    airflow: Airflow, settings: ConnectionSettings, connection: NatsPyConnection, undrained: str
) -> None:
    await provisioned(settings, DRAINING)
    await connection.client.jetstream().publish("draining", b"dead")
    await process_jobs(settings, DRAINING, 1, fail=True)
    await connection.client.jetstream().publish("draining", b"job")
    # In flight.
    (job,) = await pull_jobs(connection, DRAINING, 1)
    prolonging = asyncio.create_task(prolong(job))
    await asyncio.to_thread(airflow.wait_for_dags, "draining")
    run_id = await asyncio.to_thread(airflow.trigger, "draining")
    waiting = {"deferred": "deferred", "poking": "running", "rescheduled": "up_for_reschedule"}
    expected = waiting | {"nothing_dead": "deferred"}
    await asyncio.to_thread(wait_for_states, airflow, "draining", run_id, expected)
    prolonging.cancel()
    await job.ack_sync()

    wait_for_states(airflow, "draining", run_id, dict.fromkeys(waiting, "success") | {"nothing_dead": "deferred"})
    for task_id in waiting:
        report = airflow.xcom("draining", run_id, task_id)
        assert report["drained"]
        assert (report["pending"], report["in_flight"], report["dead_in_queue"]) == (0, 0, 1)
    log = log_text(airflow, "draining", run_id, "deferred")
    assert "draining is not drained: worker: 0 pending, 1 in flight" in log
    assert "draining is drained" in log

    await redrive_dead_letters(connection, DRAINING)
    assert [job.body for job in await process_jobs(settings, DRAINING, 1)] == [b"dead"]
    wait_for_states(airflow, "draining", run_id, {"nothing_dead": "success", "at_once": "success"})
    report = airflow.xcom("draining", run_id, "nothing_dead")
    assert (report["dead_letters"], report["stored"], report["uncertain"]) == (0, 0, 0)
    assert "draining is not drained: 1 dead letters" in log_text(airflow, "draining", run_id, "nothing_dead")
    # The queue is drained already: a deferral would only cost time.
    assert "Pausing task as DEFERRED" not in log_text(airflow, "draining", run_id, "at_once")
    assert airflow.xcom("draining", run_id, "at_once")["consumers"] == ["worker"]


def test_a_queue_that_is_not_drained_in_time_fails_or_skips(airflow: Airflow, undrained: str) -> None:
    run = airflow.wait_for_run("undrained", undrained)
    assert run["state"] == "failed"
    states = task_states(airflow, "undrained", undrained)
    assert (states["skipped"], states["failed"]) == ("skipped", "failed")
    log = log_text(airflow, "undrained", undrained, "failed")
    assert "undrained is not drained: 1 jobs that no consumer takes (undrained.b: 1)" in log
    assert "AirflowSensorTimeout" in log


def drained_trigger(queue: WorkQueue, **kwargs: Any) -> QueueDrainedTrigger:
    arguments = {
        "nats_conn_id": "nats_default",
        "work_queue": queue.model_dump(mode="json", exclude_unset=True),
        "poll_interval": 0.2,
        "deferred_at": time.time() - LONG_AGO,
    }
    return QueueDrainedTrigger(**{**arguments, **kwargs})


@pytest.mark.usefixtures("own_connections")
class TestTrigger:
    @pytest.mark.slow
    async def test_copies_fire_the_same_event_once_the_queue_is_drained(
        self, connection: NatsPyConnection, name: str, secrets: Secrets
    ) -> None:
        queue = await make_queue(connection, name)
        trigger = drained_trigger(queue, consumers=("worker",), nothing_dead=True)
        path, kwargs = recreated(trigger).serialize()
        assert (path, kwargs) == trigger.serialize()
        assert len(json.dumps(kwargs)) < 4096
        assert not any(secret in json.dumps(kwargs) for secret in secrets.all())
        await publish_jobs(connection, queue, ["job"])
        running = [asyncio.create_task(event_of(copy)) for copy in (trigger, recreated(trigger))]
        done, _ = await asyncio.wait(running, timeout=0.5)
        assert not done
        (job,) = await pull_jobs(connection, queue, 1)
        await job.ack_sync()
        first, second = await asyncio.gather(*running)
        assert first == second
        assert (first["status"], first["found"]["drained"], first["found"]["dead_letters"]) == ("found", True, 0)

    async def test_it_fires_an_error_for_a_queue_or_consumer_that_does_not_exist(
        self, connection: NatsPyConnection, name: str
    ) -> None:
        event = await event_of(drained_trigger(small_queue(name)))
        assert event["status"] == "error"
        assert event["message"].startswith(f"JS113 expected stream {name} on the server, found none")
        queue = await make_queue(connection, name)
        event = await event_of(drained_trigger(queue, consumers=["nobody"]))
        assert event["message"].startswith(f"JS113 expected consumer nobody of stream {name} on the server, found work")

    @pytest.mark.slow
    async def test_its_event_is_delayed_until_airflow_is_ready_for_it(
        self, connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL", "0")
        for margin in ("SHORTEST_MARGIN", "LONGEST_MARGIN"):
            monkeypatch.setattr(f"airflow_provider_jetstream.triggers.triggerer.{margin}", 1.0)
        trigger = drained_trigger(await make_queue(connection, name), deferred_at=time.time())
        started = time.monotonic()
        await event_of(trigger)
        assert time.monotonic() - started >= 1.0

    async def test_it_waits_while_the_server_is_away(
        self, own_nats: NatsServer, monkeypatch: pytest.MonkeyPatch, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        connection = {"conn_type": "nats", "host": "127.0.0.1", "port": own_nats.port, "extra": {"timeout": 1}}
        monkeypatch.setenv("AIRFLOW_CONN_NATS_OWN", json.dumps(connection))
        queue = await provisioned(await JetStreamHook("nats_own").asettings(), small_queue(name))
        own_nats.kill()
        # In a task's own process too.
        sensor = JetStreamQueueDrainedSensor(task_id="sensor", work_queue=queue, nats_conn_id="nats_own")
        assert not (await asyncio.to_thread(sensor.poke, {})).is_done
        running = asyncio.create_task(event_of(drained_trigger(queue, nats_conn_id="nats_own")))
        done, _ = await asyncio.wait([running], timeout=0.5)
        assert not done
        own_nats.start()
        assert (await running)["status"] == "found"
        assert (await asyncio.to_thread(sensor.poke, {})).is_done
