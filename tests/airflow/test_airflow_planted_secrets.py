"""Secrets in every field of connections: they are nowhere, whether the connections work or fail in any way."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sqlite3
import sys
import threading
import traceback
import urllib.request
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from airflow_steps import ROOT, provisioned, succeeded, task_states
from dags.planted import QUEUE, WAYS
from pydantic import SecretStr

from airflow_provider_jetstream.dev.airflow_home import database_path
from airflow_provider_jetstream.dev.process import Process
from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream import connect
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.worker import Worker
from testbed.authentication import environment
from testbed.dead_letters import stream_messages
from testbed.page import running_page
from testbed.planted_secrets import files_with_secrets, places_of_secrets, planted, processes_with_secrets
from testbed.ports import LOOPBACK, free_port
from testbed.queues import eventually
from testbed.spark_face import NatsSocket, run_on_own_connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    import psutil
    from planted_connections import PlantedConnections

    from airflow_provider_jetstream.jetstream import Connection, ConnectionSettings
    from testbed.airflow import Airflow

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def is_known(process: psutil.Process, variable: str) -> bool:
    """Return whether a process is given secrets in a variable: this Airflow's connections, workers' and Spark's."""
    return variable.startswith(("AIRFLOW_CONN_", "NATS_"))


@contextmanager
def looking_at_processes() -> Iterator[dict[str, str]]:
    """Look again and again for secrets in the command lines and environments of processes."""
    found: dict[str, str] = {}
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.5):
            found.update(processes_with_secrets(is_known))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield found
    finally:
        ended.set()
        looking.join()


@contextmanager
def looking_at_triggers(airflow: Airflow) -> Iterator[list[str]]:
    """Note the rows of triggers while they are there."""
    rows: list[str] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.3):
            connecting = closing(sqlite3.connect(f"file:{database_path(airflow.home)}?mode=ro", uri=True))
            with connecting as database, suppress(sqlite3.OperationalError):
                rows.extend(map(str, database.execute("SELECT * FROM trigger").fetchall()))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield rows
    finally:
        ended.set()
        looking.join()


def connection_values(settings: ConnectionSettings) -> dict[str, str]:
    """Return the fields of settings that aren't the default ones, with their secrets."""
    found = {
        name: getattr(settings, name)
        for name, field in type(settings).model_fields.items()
        if getattr(settings, name) != field.default
    }
    texts = {
        name: value.get_secret_value() if isinstance(value, SecretStr) else str(value) for name, value in found.items()
    }
    return texts | {"servers": ",".join(settings.servers), "timeout": f"{settings.timeout:g}"}


def spark_options(settings: ConnectionSettings) -> dict[str, str]:
    """Return the options with which Spark connects."""
    return {
        re.sub("_(.)", lambda match: match[1].upper(), name): value
        for name, value in connection_values(settings).items()
    }


def worker_environment(settings: ConnectionSettings) -> dict[str, str]:
    """Return the variables with which a worker connects."""
    found = environment(connection_values(settings), "NATS_")
    return {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'airflow'}", **found}


@asynccontextmanager
async def working(way: str, logs: Path) -> AsyncIterator[int]:
    """Provision the queue, and run a worker with the connection of this way; yield the port of its metrics."""
    settings = JetStreamHook(f"planted_{way}").settings()
    await provisioned(settings, QUEUE)
    file = logs / f"{way}.yaml"
    file.write_text(QUEUE.to_yaml())
    port = free_port()
    command = [
        *(sys.executable, "-m", "airflow_provider_jetstream.worker.cli", "run", "--queue", str(file)),
        *("--consumer", "worker", "--handler", "airflow_handlers:picky", "--metrics-port", str(port)),
    ]
    worker = Process.start(command, env=worker_environment(settings), log_file=logs / f"{way}.log")
    try:
        yield port
    finally:
        worker.terminate(10)


async def stored_bytes(way: str) -> bytes:
    """Return all that the streams of a server store."""
    content: list[bytes] = []
    async with connect(JetStreamHook(f"planted_{way}").settings()) as connection:
        for stream in (await connection.api("STREAM.NAMES"))["streams"]:
            for message in await stream_messages(connection, stream):
                content += [message.subject.encode(), str(message.headers).encode(), message.data]
    assert len(content) > 10
    return b"\n".join(content)


@pytest.mark.usefixtures("own_connections")
async def test_tasks_triggers_and_workers_leave_no_secret_anywhere(
    airflow: Airflow, planted_ways: PlantedConnections, tmp_path: Path
) -> None:
    airflow.wait_for_dags("planted", "planted_failing")
    with looking_at_processes() as in_processes, looking_at_triggers(airflow) as triggers:
        async with working("nkey", tmp_path) as port, working("credentials", tmp_path), working("file", tmp_path):
            run, failing = airflow.trigger("planted"), airflow.trigger("planted_failing")
            await asyncio.to_thread(succeeded, airflow, "planted", run, 300)
            await asyncio.to_thread(airflow.wait_for_run, "planted_failing", failing, 300)
            metrics = await asyncio.to_thread(lambda: _direct.open(f"http://{LOOPBACK}:{port}/metrics").read())
    states = task_states(airflow, "planted_failing", failing)
    assert states.pop("every_failure") == "success"
    assert set(states.values()) == {"failed"}
    answers = airflow.xcom("planted_failing", failing, "every_failure")
    assert [answer.partition(":")[0] for answer in answers] == planted_ways.failing()
    assert b"jetstream_worker" in metrics
    assert any("planted" in row for row in triggers)
    assert in_processes == {}
    for content in (metrics, *(str(rows).encode() for rows in (triggers, answers))):
        assert places_of_secrets(content) == []
    for way in WAYS:
        assert places_of_secrets(await stored_bytes(way)) == []
        for page in ("connz?auth=1&subs=1", "jsz?config=1&streams=1&consumers=1", "varz"):
            server = planted_ways.servers[WAYS.index(way)]
            assert places_of_secrets(json.dumps(server.monitor(page)).encode()) == []
    logs = [tmp_path / f"{way}.log" for way in WAYS]
    assert all(b"worker" in log.read_bytes() for log in logs)
    assert files_with_secrets((airflow.home, tmp_path)) == {}


def test_airflow_masks_what_is_stored_in_a_connection(airflow: Airflow) -> None:
    fields = {"conn_type": "nats", "host": LOOPBACK, "login": "u", "password": planted("stored-password")}
    extra = {name: planted(f"stored-{name}") for name in ("token", "nkey_seed_secret", "credentials_secret")}
    body = {"connection_id": "planted_stored", **fields, "extra": json.dumps(extra)}
    airflow.api("POST", "connections", body)
    try:
        airflow.api("PATCH", "connections/planted_stored", {**body, "host": "localhost"})
        paths = ("connections/planted_stored", "connections", "eventLogs?limit=100&order_by=-event_log_id")
        answers = [airflow.request("GET", path) for path in paths]
        assert "planted_stored" in answers[-1].text
        assert [places_of_secrets(answer.content) for answer in answers] == [[], [], []]
        answer = airflow.request("POST", "connections/test", body)
        assert places_of_secrets(answer.content) == []
    finally:
        airflow.api("DELETE", "connections/planted_stored")


@pytest.mark.slow
@pytest.mark.usefixtures("own_connections")
async def test_no_part_shows_a_secret_in_an_error_or_in_its_log(
    planted_ways: PlantedConnections, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    shown: list[str] = []

    async def try_each(conn_id: str) -> None:
        try:
            settings = JetStreamHook(conn_id).settings()
        except JetStreamProviderError as error:
            note(error)
            return
        shown.append(settings.client)
        if "path" not in conn_id:
            shown.append(f"{settings!r} {settings} {settings.model_dump_json()}")
        for attempt in (
            lambda: Worker(QUEUE, "worker", lambda job: None, settings).run(),
            lambda: asyncio.to_thread(NatsSocket, settings),
            lambda: asyncio.to_thread(run_on_own_connection, spark_options(settings), _info),
            lambda: JetStreamHook(conn_id).adiscover_queue("planted"),
        ):
            with pytest.raises(Exception) as failed:  # noqa: PT011 (every error is looked at)
                await attempt()
            note(failed.value)

    def note(error: BaseException) -> None:
        shown.extend(["".join(traceback.format_exception(error)), repr(error), str(vars(error))])

    # A few at a time: each silent one takes its time limit.
    await asyncio.gather(*map(try_each, planted_ways.failing()))
    async with running_page(planted_ways.connections) as page:

        async def problems() -> list[str]:
            states = (await page.get("snapshot")).json()["connections"]
            return [state for state in states if state.get("problem")]

        found = await eventually(lambda: _as_many(problems, len(planted_ways.failing())), 60)
        shown.append(json.dumps(found))
    printed = capfd.readouterr()
    for text in (*shown, caplog.text, printed.out, printed.err):
        assert places_of_secrets(text.encode(errors="replace")) == []


async def _as_many(find: Any, count: int) -> list[str] | None:
    found: list[str] = await find()
    return found if len(found) >= count else None


async def _info(connection: Connection) -> dict[str, Any]:
    return await connection.api("INFO")
