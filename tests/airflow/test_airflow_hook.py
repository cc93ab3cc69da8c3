"""The hook: its blocking methods, their awaitable twins, and the settings of a connection."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from airflow_steps import process_jobs
from dags.redrives import queue as queue_of

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream import RedriveRequest, Selection
from airflow_provider_jetstream.jetstream.errors import ConnectionSettingsError, EventLoopError, UnreachableError
from testbed.ports import LOOPBACK, free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from airflow_steps import Secrets

    from airflow_provider_jetstream.jetstream import Connection, ConnectionSettings
    from testbed.nats_server import NatsServer

pytestmark = pytest.mark.usefixtures("own_connections")

ONLY_TWO = Selection(sequences=frozenset({2}))
BLOCKING: dict[str, Callable[[JetStreamHook, str], Any]] = {
    "provision": lambda hook, name: hook.provision(queue_of(name)),
    "publish": lambda hook, name: hook.publish(["job"], subject=f"{name}.a"),
    "cancel": lambda hook, name: hook.cancel(queue_of(name), "a"),
    "find_dead_letters": lambda hook, name: hook.find_dead_letters(queue_of(name)),
    "scan_dead_letters": lambda hook, name: hook.scan_dead_letters(queue_of(name)),
    "account": lambda hook, name: hook.account(queue_of(name)),
    "redrive": lambda hook, name: hook.redrive(queue_of(name)),
    "preview_redrive": lambda hook, name: hook.preview_redrive(queue_of(name)),
    "test_connection": lambda hook, name: hook.test_connection(),
}


@pytest.mark.parametrize("method", [name for name in BLOCKING if name != "test_connection"])
async def test_a_blocking_call_inside_a_running_loop_is_refused(method: str, name: str) -> None:
    with pytest.raises(EventLoopError) as raised:
        BLOCKING[method](JetStreamHook(), name)
    assert str(raised.value) == (
        "expected no running event loop, found one: a blocking call would stop it; await the method of the same name"
        ' that starts with "a" (aprovision, apublish, …)'
    )


@pytest.mark.slow
def test_blocking_methods(settings: ConnectionSettings, name: str) -> None:
    hook, queue = JetStreamHook(), queue_of(name)
    assert len(hook.provision(queue).changes) == 6
    assert hook.provision(queue).changes == ()
    assert hook.publish(["first", "second"], subject=f"{name}.a").stored == 2
    asyncio.run(process_jobs(settings, queue, 2, fail=True))
    assert [letter.sequence for letter in hook.find_dead_letters(queue).letters] == [1, 2]
    assert [letter.sequence for letter in hook.find_dead_letters(queue, {"sequences": [2]}).letters] == [2]
    assert hook.scan_dead_letters(queue, ONLY_TWO, ["reason"]).ranges == [(2, 2)]
    assert hook.preview_redrive(queue, RedriveRequest(ONLY_TWO)).redriven == 1
    assert hook.redrive(queue, RedriveRequest(ONLY_TWO)).redriven == {2: 3}
    account = hook.account(queue)
    assert (account.jobs, account.stored, account.ended, account.unaccounted) == (3, 2, 1, ())


async def test_awaitable_twins(settings: ConnectionSettings, name: str) -> None:
    hook, queue = JetStreamHook(), queue_of(name)
    assert len((await hook.aprovision(queue)).changes) == 6
    assert (await hook.aprovision(queue)).changes == ()
    assert (await hook.apublish(["first", "second"], subject=f"{name}.a")).stored == 2
    await process_jobs(settings, queue, 2, fail=True)
    assert [letter.sequence for letter in (await hook.afind_dead_letters(queue)).letters] == [1, 2]
    assert [letter.sequence for letter in (await hook.afind_dead_letters(queue, ONLY_TWO)).letters] == [2]
    assert (await hook.ascan_dead_letters(queue, {"sequences": [2]}, ["reason"])).ranges == [(2, 2)]
    assert (await hook.apreview_redrive(queue, RedriveRequest(ONLY_TWO))).redriven == 1
    assert (await hook.aredrive(queue, RedriveRequest(ONLY_TWO))).redriven == {2: 3}
    assert (await hook.aaccount(queue)).ended == 1
    async with hook.shared() as first, hook.shared() as second:
        assert first is second


def test_there_is_no_bare_connection_and_the_error_says_what_to_call() -> None:
    with pytest.raises(NotImplementedError, match=r"found get_conn: .*call hook\.blocking\(function\)"):
        JetStreamHook().get_conn()


def test_a_request_of_ones_own_gets_the_open_connection() -> None:
    async def account(connection: Connection) -> dict[str, Any]:
        return await connection.api("INFO")

    assert JetStreamHook().blocking(account)["type"] == "io.nats.jetstream.api.v1.account_info_response"


async def test_an_error_about_the_connection_names_it_whoever_shares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = json.dumps({"conn_type": "nats", "host": LOOPBACK, "port": free_port(), "extra": {"timeout": 1}})
    for conn_id in ("NATS_AWAY", "NATS_AWAY_TOO"):
        monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id}", fields)

    async def error_of(conn_id: str) -> str:
        with pytest.raises(UnreachableError) as caught:
            await JetStreamHook(conn_id).aplan(queue_of("away"))
        return str(caught.value)

    texts = await asyncio.gather(error_of("nats_away"), error_of("nats_away_too"))
    for conn_id, text in zip(("nats_away", "nats_away_too"), texts, strict=True):
        assert text.startswith(f"connection {conn_id!r}: no NATS server reached at nats://{LOOPBACK}:")


@pytest.mark.parametrize(
    ("conn_id", "ok", "message"),
    [
        ("nats_default", True, "Connected to nats-server 2."),
        ("nats_token", True, "Connected to nats-server 2."),
        ("nats_without_jetstream", False, "expected JetStream, found a server or account without it"),
        ("nats_unknown_extra", False, "inbox_prefix, timeout, found tokn; remove or correct them"),
    ],
)
def test_testing_a_connection_returns_what_was_found(conn_id: str, message: str, *, ok: bool) -> None:
    works, text = JetStreamHook(conn_id).test_connection()
    assert works is ok
    assert text.startswith(message) or message in text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "connection 'nats_bad': expected a host, found none; set it"),
        (
            {"host": "one:port"},
            "expected host:port with a port from 1 to 65535, and brackets around IPv6, found 'one:…'",
        ),
        ({"host": "::1", "port": 4333}, "brackets around IPv6"),
        (
            {"host": "nats://me:sec,ret@one"},
            "connection 'nats_bad': expected addresses without credentials, found an @",
        ),
        ({"host": "http://one"}, "expected a nats:// or tls:// address, found the scheme 'http'"),
        ({"host": "one", "password": "it"}, "expected a user with the password, found none"),
        ({"host": "one", "extra": {"timeout": 0}}, "timeout: Input should be greater than 0"),
        ({"host": "one, tls://two"}, "expected either tls:// for all servers or for none, found both"),
    ],
)
async def test_a_connection_that_cannot_be_used_is_explained(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, object], message: str
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_NATS_BAD", json.dumps({"conn_type": "nats", **fields}))
    with pytest.raises(ConnectionSettingsError) as raised:
        await JetStreamHook("nats_bad").asettings()
    assert message in str(raised.value)
    assert "sec" not in str(raised.value)


async def test_a_connection_of_a_secrets_backend_is_used(
    nats: NatsServer, secrets: Secrets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    file = tmp_path / "connections.json"
    kept = {"conn_type": "nats", "host": LOOPBACK, "port": nats.port, "login": "airflow", "password": secrets.password}
    file.write_text(json.dumps({"nats_kept_elsewhere": kept}))
    monkeypatch.setenv("AIRFLOW__SECRETS__BACKEND", "airflow.secrets.local_filesystem.LocalFilesystemBackend")
    monkeypatch.setenv("AIRFLOW__SECRETS__BACKEND_KWARGS", json.dumps({"connections_file_path": str(file)}))
    hook = JetStreamHook("nats_kept_elsewhere")
    assert len((await hook.aprovision(queue_of(name))).changes) == 6
    assert (await asyncio.to_thread(hook.publish, ["job"], subject=f"{name}.a")).stored == 1
