"""Each way to prove who is asking, in each part that connects: the same settings, and the same refusal."""

from __future__ import annotations

import asyncio
import json
import time
import traceback
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream import ConnectionSettings, JobsHandle, connect, take_cursor
from airflow_provider_jetstream.jetstream.errors import AuthenticationError, JetStreamProviderError, TLSError
from airflow_provider_jetstream.triggers.completion import JobCompletionTrigger
from airflow_provider_jetstream.worker import (
    Delivery,
    Worker,
)
from airflow_provider_jetstream.worker.errors import GiveUpError
from testbed.authentication import SECRET, WAYS, authenticating_server, environment
from testbed.page import running_page
from testbed.queues import CONSUMER, eventually, small_queue
from testbed.spark_face import run_on_own_connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import Connection, WorkQueue

CONN_ID = "nats_matrix"
_NOT_EXTRAS = ("servers", "user", "password")


def airflow_connection(values: dict[str, Any]) -> str:
    """Return a connection of Airflow with these settings, as JSON."""
    fields = {"host": values["servers"], "login": values.get("user"), "password": values.get("password")}
    extra = {name: value for name, value in values.items() if name not in _NOT_EXTRAS}
    return json.dumps({"conn_type": "nats", **fields, "extra": extra})


@pytest.fixture
def settings_everywhere(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give settings to Airflow, and to the environment of workers and of Spark."""

    def give(values: dict[str, Any]) -> ConnectionSettings:
        monkeypatch.setenv(f"AIRFLOW_CONN_{CONN_ID.upper()}", airflow_connection(values))
        for name, value in (environment(values, "NATS_") | environment(values, "NATS_MATRIX_")).items():
            monkeypatch.setenv(name, value)
        return ConnectionSettings.from_environment(environment(values, "NATS_"))

    return give


def handle(job: Delivery) -> None:
    if job.body == b"bad":
        raise GiveUpError("bad")


@asynccontextmanager
async def running_worker(queue: WorkQueue, settings: ConnectionSettings) -> AsyncIterator[None]:
    worker = Worker(queue, CONSUMER, handle, settings)
    running = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        worker.stop()
        await running


async def monitored_queues() -> list[str]:
    async with running_page([CONN_ID]) as page:

        async def names() -> list[str]:
            (state,) = (await page.get("snapshot")).json()["connections"]
            return [queue["queue"] for queue in state["queues"]]

        return list(await eventually(names, 30))


async def _api_level(connection: Connection) -> int:
    return int((await connection.api("INFO"))["api"].get("level", 0))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
async def test_every_part_connects_in_every_way(way: str, tmp_path: Path, settings_everywhere: Any, name: str) -> None:
    with authenticating_server(way, tmp_path) as (_, values):
        settings = settings_everywhere(values)
        hook, queue = JetStreamHook(CONN_ID), small_queue(name)
        assert (await asyncio.to_thread(hook.test_connection))[0]
        # The blocking methods, as tasks call them.
        await asyncio.to_thread(hook.provision, queue)
        async with connect(settings) as connection:
            cursor = await take_cursor(connection, queue)
        report = await asyncio.to_thread(hook.publish, [b"good", b"bad"], subject=f"{name}.jobs.a")
        async with running_worker(queue, settings):
            trigger = JobCompletionTrigger(
                nats_conn_id=CONN_ID,
                handle=JobsHandle(cursor=cursor, sequences=[(1, 2)]),
                tolerance={"max_dead": None},
                deadline=time.time() + 60,
                deferred_at=time.time() - 3600,
                summary={"published": report.stored},
            )
            (event,) = [event async for event in trigger.run()]
        assert event.payload["status"] == "ended", event.payload
        redriven = await hook.aredrive(queue)
        assert len(redriven.redriven) == 1
        assert name in await monitored_queues()
        assert await asyncio.to_thread(run_on_own_connection, {"connection": "matrix"}, _api_level) >= 0


async def _refusal(values: dict[str, Any]) -> list[JetStreamProviderError]:
    """Connect both ways, and return the two errors."""
    errors: list[JetStreamProviderError] = []
    settings = ConnectionSettings(**{**values, "servers": (values["servers"],)}, timeout=20)
    with pytest.raises(JetStreamProviderError) as refused:
        async with connect(settings):
            pass
    errors.append(refused.value)
    from testbed.spark_face import NatsSocket

    with pytest.raises(JetStreamProviderError) as refused:
        await asyncio.to_thread(NatsSocket, settings)
    errors.append(refused.value)
    for error in errors:
        assert SECRET not in "".join(traceback.format_exception(error))
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("none", "another server name")])
async def test_both_connections_name_the_cause_without_the_proof(way: str, tmp_path: Path) -> None:
    with authenticating_server(way, tmp_path) as (_, values):
        kept = {"servers", "tls_ca_file", "tls_handshake_first"}
        stripped = {name: value for name, value in values.items() if name in kept}
        if way == "handshake first":
            stripped.pop("tls_ca_file")
        for error in await _refusal(stripped):
            if way in ("client certificate", "handshake first"):
                assert isinstance(error, TLSError), error
                assert "tls_cert_file" in str(error) or "tls_ca_file" in str(error)
            else:
                assert isinstance(error, AuthenticationError), error
                assert "refused the credentials" in str(error)
                assert "found none" in str(error)


async def test_a_wrong_host_name_is_refused(tmp_path: Path) -> None:
    with authenticating_server("own authority", tmp_path) as (_, values):
        for error in await _refusal({**values, "tls_server_name": "elsewhere.example.org"}):
            assert isinstance(error, TLSError)
            assert "check tls_ca_file and the host name" in str(error)
            assert "elsewhere.example.org" in str(error)
