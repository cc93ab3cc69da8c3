"""Secrets that are exchanged and servers that move while connections are open: the settings are read again."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream import (
    ConnectionSettings,
    JobsHandle,
    connect,
    connection_settings,
    shared_connection,
    take_cursor,
    wait,
)
from airflow_provider_jetstream.jetstream.errors import AuthenticationError, UnreachableError
from airflow_provider_jetstream.triggers.completion import JobCompletionTrigger
from airflow_provider_jetstream.worker import Worker
from testbed import seams
from testbed.nats_server import NatsServer
from testbed.ports import free_ports
from testbed.queues import CONSUMER, eventually, make_queue, store_completion

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import Connection
    from testbed.face import NatsPyConnection

OLD, NEW = "0ld-s3cret", "n3w-s3cret"
LIMIT = 60.0


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer(user="u", password=OLD) as running:
        yield running


class AirflowConnection:
    """What a lookup of the connection in Airflow returns at the moment."""

    def __init__(self, server: NatsServer, **values: Any) -> None:
        self.values: dict[str, Any] = {"servers": (server.url,), "user": "u", "password": OLD, "timeout": 5, **values}
        self.lookups = 0

    def settings(self) -> ConnectionSettings:
        return connection_settings(self.values)

    async def renew(self) -> ConnectionSettings:
        self.lookups += 1
        return self.settings()


def exchange_password(server: NatsServer) -> None:
    """Restart the server with another password."""
    server.stop()
    server.password = NEW
    server.start()


def reload_password(server: NatsServer) -> None:
    """Make the running server close all connections and take another password."""
    server.password = NEW
    server.reload()


def move(server: NatsServer) -> None:
    """Start the server, with its streams, at another address."""
    server.stop()
    server.port, server.monitor_port = free_ports(2)
    server.start()


@pytest.mark.slow
@pytest.mark.parametrize("change", ["password", "reload", "address", "both"])
async def test_who_waits_goes_on_with_the_changed_settings_and_misses_nothing(
    server: NatsServer, name: str, change: str
) -> None:
    airflow = AirflowConnection(server)
    async with shared_connection(airflow.settings(), airflow.renew) as connection:
        queue = await make_queue(connection, name, consumer={"ack_wait": "60s"})
        cursor = await take_cursor(connection, queue)
        for _ in range(2):
            await connection.publish_acknowledged(f"{name}.jobs.a", b"")
        seen: list[set[int]] = []
        waiting = asyncio.create_task(
            wait(connection, cursor, [1, 2], progress=lambda report: seen.append(set(report.completed)))
        )
        await store_completion(connection, queue, 1)
        await eventually(lambda: seen, LIMIT)
        if change == "reload":
            reload_password(server)
        if change in ("password", "both"):
            await asyncio.to_thread(exchange_password, server)
        if change in ("address", "both"):
            await asyncio.to_thread(move, server)
        # Ends while the waiter is away.
        airflow.values |= {"servers": (server.url,), "password": server.password}
        async with connect(airflow.settings()) as other:
            await store_completion(other, queue, 2)
        async with asyncio.timeout(LIMIT):
            report = await waiting
        assert report.completed == {1, 2}
        assert connection.reconnects == 1
        assert airflow.lookups >= 1


@pytest.mark.slow
async def test_a_trigger_and_a_task_read_the_airflow_connection_again(
    server: NatsServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give(password: str) -> None:
        fields = {"conn_type": "nats", "host": server.url, "login": "u", "password": password, "extra": {"timeout": 5}}
        monkeypatch.setenv("AIRFLOW_CONN_NATS_ROTATED", json.dumps(fields))

    give(OLD)
    hook = JetStreamHook("nats_rotated")
    async with connect(await hook.asettings()) as connection:
        queue = await make_queue(connection, name, consumer={"ack_wait": "60s"})
        cursor = await take_cursor(connection, queue)
        await connection.publish_acknowledged(f"{name}.jobs.a", b"")

    async def wait_in_task(connection: Connection) -> int:
        return len((await wait(connection, cursor, [1])).completed)

    trigger = JobCompletionTrigger(
        nats_conn_id="nats_rotated",
        handle=JobsHandle(cursor=cursor, sequences=[(1, 1)]),
        tolerance={},
        deadline=time.time() + 600,
        deferred_at=time.time() - 3600,
        summary={"published": 1},
    )

    async def event() -> dict[str, Any]:
        (fired,) = [fired async for fired in trigger.run()]
        return dict(fired.payload)

    deferred = asyncio.create_task(event())
    blocking = asyncio.create_task(asyncio.to_thread(hook.blocking, wait_in_task))
    await eventually(lambda: server.monitor("connz")["num_connections"] == 2, LIMIT)
    await asyncio.to_thread(exchange_password, server)
    give(NEW)
    async with connect(connection_settings({"servers": (server.url,), "user": "u", "password": NEW})) as other:
        await store_completion(other, queue, 1)
    async with asyncio.timeout(2 * LIMIT):
        assert await blocking == 1
        assert (await deferred)["status"] == "ended"


@pytest.mark.slow
async def test_a_secret_in_a_file_is_read_at_every_attempt(server: NatsServer, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(OLD)
    airflow = AirflowConnection(server, password=None, password_file=str(file))
    async with connect(airflow.settings()) as connection:
        await asyncio.to_thread(exchange_password, server)
        await eventually(lambda: isinstance(connection.loss, AuthenticationError), LIMIT)
        file.write_text(NEW)
        assert await connection.wait_until_connected(LIMIT)
        await connection.api("INFO")


@pytest.mark.slow
async def test_who_comes_later_is_told_the_cause_within_the_time_limit(server: NatsServer) -> None:
    airflow = AirflowConnection(server)
    async with shared_connection(airflow.settings(), airflow.renew):
        await asyncio.to_thread(exchange_password, server)
        with pytest.raises(AuthenticationError, match="refused the credentials"):
            async with shared_connection(airflow.settings(), airflow.renew):
                pass
        server.stop()
        with pytest.raises((UnreachableError, AuthenticationError), match=server.url):
            async with shared_connection(airflow.settings(), airflow.renew):
                pass


async def _closed_connection_of(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch, airflow: AirflowConnection
) -> NatsPyConnection:
    monkeypatch.setattr(seams.OUTAGE_REFUSED_FOR_GOOD, 1.0)
    async with connect(airflow.settings(), airflow.renew) as connection:
        await asyncio.to_thread(exchange_password, server)
        await eventually(lambda: connection.is_closed, LIMIT)
        return connection


@pytest.mark.slow
async def test_credentials_that_stay_refused_close_the_connection_with_the_reason(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    airflow = AirflowConnection(server)
    with caplog.at_level(logging.WARNING):
        connection = await _closed_connection_of(server, monkeypatch, airflow)
    assert isinstance(connection.close_reason, AuthenticationError)
    with pytest.raises(AuthenticationError, match="refused the credentials"):
        await connection.api("INFO")
    assert f"The connection to {server.url} is lost" in caplog.text
    assert OLD not in caplog.text


@pytest.mark.slow
async def test_a_wait_and_a_worker_end_with_that_reason(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(seams.OUTAGE_REFUSED_FOR_GOOD, 1.0)
    airflow = AirflowConnection(server)
    async with connect(airflow.settings()) as connection:
        queue = await make_queue(connection, name)
        cursor = await take_cursor(connection, queue)
        waiting = asyncio.create_task(wait(connection, cursor, [1]))
        running = asyncio.create_task(Worker(queue, CONSUMER, lambda _: None, airflow.settings(), deadline=None).run())
        await eventually(lambda: server.monitor("connz")["num_connections"] == 2, LIMIT)
        await asyncio.to_thread(exchange_password, server)
        async with asyncio.timeout(2 * LIMIT):
            for task in (waiting, running):
                with pytest.raises(AuthenticationError, match="refused the credentials"):
                    await task


@pytest.mark.slow
async def test_a_lookup_that_fails_is_repeated(server: NatsServer, caplog: pytest.LogCaptureFixture) -> None:
    airflow = AirflowConnection(server)

    async def renew() -> ConnectionSettings:
        airflow.lookups += 1
        if airflow.lookups == 1:
            raise RuntimeError(OLD)
        return airflow.settings()

    async with connect(airflow.settings(), renew) as connection:
        airflow.values["password"] = NEW
        await asyncio.to_thread(exchange_password, server)
        assert await connection.wait_until_connected(LIMIT)
        assert airflow.lookups == 2
    assert "can't be read again: RuntimeError" in caplog.text
    assert OLD not in caplog.text
