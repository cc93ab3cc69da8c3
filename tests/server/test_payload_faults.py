"""The mode payload of the message trigger while something is wrong, and for a while under load."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import connect, connection_settings, get_message, permissions, provision
from testbed import seams
from testbed.nats_server import NatsServer
from testbed.queues import CONSUMER, eventually, make_queue, publish_jobs, small_queue

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection

pytest.importorskip("airflow.triggers.shared_stream", reason="the mode payload needs Airflow 3.3")

from stream_watchers import StreamWatchers, connect_airflow_to, is_empty, payload_trigger

FULL = os.environ.get("FAULTS") == "full"
PATIENT = {"ack_wait": "30s", "max_deliver": 50}


@pytest.fixture(autouse=True)
def short_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams.TAKEN_MESSAGES_HOLD, 0.2)


def own_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("airflow_provider_jetstream")]


@pytest.mark.slow
async def test_a_deleted_consumer_is_reported_now_and_then_and_its_successor_is_pulled_from(
    connection: NatsPyConnection,
    nats: NatsServer,
    name: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connect_airflow_to(nats, monkeypatch)
    queue = await make_queue(connection, name, consumer=PATIENT)
    with caplog.at_level(logging.WARNING):
        async with StreamWatchers(payload_trigger(queue)) as watchers:
            await publish_jobs(connection, queue, ["a"])
            await eventually(lambda: watchers.stored)
            await connection.api(f"CONSUMER.DELETE.{name}.{CONSUMER}")
            await eventually(lambda: caplog.text.count(f"expected consumer {CONSUMER} of stream {name}") > 1)
            await provision(connection, queue)
            await publish_jobs(connection, queue, ["b"])
            await eventually(lambda: is_empty(connection, queue))
    assert {2} <= set(watchers.sequences())
    assert len(own_lines(caplog)) < 20


@pytest.mark.slow
async def test_a_server_that_is_away_is_waited_for(
    own_nats: NatsServer, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect_airflow_to(own_nats, monkeypatch)
    settings = connection_settings({"servers": (own_nats.url,), "timeout": 5})
    away = 60 if FULL else 5
    with caplog.at_level(logging.WARNING):
        async with connect(settings) as connection:
            queue = await make_queue(connection, name, consumer={"ack_wait": "2s", "max_deliver": 20}, jobs=["a", "b"])
        async with StreamWatchers(payload_trigger(queue)) as watchers:
            watchers.stores = False
            await eventually(lambda: len(watchers.fired) == 2)
            own_nats.kill()
            caplog.clear()
            await asyncio.sleep(1)
            watchers.stores = True
            await asyncio.sleep(away - 1)
            assert len(own_lines(caplog)) <= 6 + away / 10, caplog.text
            own_nats.start()
            async with connect(settings) as connection:
                await publish_jobs(connection, queue, ["c"])
                await eventually(lambda: is_empty(connection, queue))
    assert sorted(watchers.sequences()) == [1, 2, 3]


def users(policy: dict[str, Any]) -> str:
    admin = '{user: admin, password: "p"}'
    return f'authorization {{ users: [{admin}, {{user: airflow, password: "p", permissions: {json.dumps(policy)}}}] }}'


@pytest.mark.slow
async def test_withdrawn_permissions_are_reported_now_and_then(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The role of a worker is enough; without pulls, and then without acknowledgements, it waits for it."""
    queue = small_queue(name, consumer=PATIENT)
    role = permissions(queue, "worker", consumer=CONSUMER)
    allowed: dict[str, list[str]] = {"publish": [], "subscribe": []}
    for line in role.permissions:
        allowed[line.action].append(line.subject)

    def without(part: str) -> str:
        return users({action: [one for one in subjects if part not in one] for action, subjects in allowed.items()})

    def is_reported(part: str) -> bool:
        return any(part in line for line in own_lines(caplog))

    with NatsServer(config=users(allowed)) as server:
        connect_airflow_to(
            server, monkeypatch, login="airflow", password="p", extra={"timeout": 2, "inbox_prefix": role.inbox_prefix}
        )
        settings = connection_settings({"servers": (server.url,), "user": "admin", "password": "p", "timeout": 5})
        async with connect(settings) as connection, StreamWatchers(payload_trigger(queue)) as watchers:
            await provision(connection, queue)
            with caplog.at_level(logging.WARNING):
                await publish_jobs(connection, queue, ["a"])
                await eventually(lambda: is_empty(connection, queue))
                for part in ("MSG.NEXT", "$JS.ACK"):
                    caplog.clear()
                    server.config = without(part)
                    server.reload()
                    await publish_jobs(connection, queue, [part])
                    await eventually(partial(is_reported, part))
                    await asyncio.sleep(60 if FULL else 2)
                    assert len(own_lines(caplog)) < 20, caplog.text
                    server.config = users(allowed)
                    server.reload()
                    await eventually(lambda: is_empty(connection, queue), 60)
        assert sorted(watchers.sequences()) == [1, 2, 3]
        assert not watchers.errors


@pytest.mark.slow
async def test_messages_of_five_megabytes_leave_the_triggerer_alive(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with NatsServer(config="max_payload: 8MB") as server:
        connect_airflow_to(server, monkeypatch)
        async with connect(connection_settings({"servers": (server.url,), "timeout": 5})) as connection:
            queue = await make_queue(connection, name, consumer=PATIENT)
            bodies = [*(b"\xff" * (5 << 20), b"[" * (5 << 20)) * 3, b"small"]
            await publish_jobs(connection, queue, bodies)
            async with StreamWatchers(payload_trigger(queue)) as watchers:
                await eventually(lambda: is_empty(connection, queue))
            events = {payload["sequence"]: payload for _, payload in watchers.stored}
            assert [events[number]["encoding"] for number in range(1, 8)] == ["stored"] * 6 + ["utf-8"]
            for number in (1, 2, 6):
                copy = await get_message(
                    connection, events[number]["stored"]["stream"], events[number]["stored"]["sequence"]
                )
                assert copy is not None
                assert copy.data == bodies[number - 1]
