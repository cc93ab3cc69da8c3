"""What the server says right before it ends a connection is what the worker, the hook and the publisher say."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream import (
    AuthenticationError,
    ConnectionSettingsError,
    JetStreamProviderError,
    Job,
    PublishError,
    SubscriptionRefusedError,
    TerminalError,
    TLSError,
    TransientError,
    UnreachableError,
    connect,
    connection_settings,
    publish,
)
from airflow_provider_jetstream.jetstream.client.denials import ERROR_KINDS
from airflow_provider_jetstream.worker import Worker
from testbed.authentication import authenticating_server, make_pair, operator_mode
from testbed.ports import LOOPBACK
from testbed.queues import CONSUMER, eventually, make_queue, small_queue
from testbed.spark_face import NatsSocket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.nats_server import NatsServer

SOON = 20.0
FULL = "maximum connections exceeded"
TRIES = 5


def settings_of(server: NatsServer, **values: Any) -> ConnectionSettings:
    return connection_settings({"servers": (server.url,), "timeout": 3, **values})


async def restarted(server: NatsServer) -> None:
    """Restart a server, and wait until it has no connection, that of the wait for its start included."""
    await asyncio.to_thread(server.restart)
    await eventually(lambda: not server.monitor("connz")["connections"])


async def opened(settings: ConnectionSettings) -> None:
    async with connect(settings):
        pass


async def opened_blocking(settings: ConnectionSettings) -> None:
    with contextlib.closing(await asyncio.to_thread(NatsSocket, settings)):
        pass


@pytest.mark.parametrize("way", ["none", "own authority", "handshake first"])
async def test_a_full_server_is_named_and_transient(tmp_path: Path, way: str) -> None:
    with authenticating_server(way, tmp_path) as (server, values):
        settings = settings_of(server, **values | {"servers": (server.url,)})
        server.config += "\nmax_connections: 1"
        await restarted(server)
        async with connect(settings):
            for _ in range(TRIES):
                for open_it in (opened, opened_blocking):
                    with pytest.raises(UnreachableError, match=FULL) as caught:
                        await open_it(settings)
                    assert isinstance(caught.value, TransientError)
                    assert "TLS" not in str(caught.value)


async def test_worker_hook_and_publisher_name_a_full_server(
    own_nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_nats.config = "max_connections: 1"
    await restarted(own_nats)
    queue = small_queue("q")
    fields = {"conn_type": "nats", "host": own_nats.url, "extra": {"timeout": 2}}
    monkeypatch.setenv("AIRFLOW_CONN_NATS_FULL", json.dumps(fields))
    async with connect(settings_of(own_nats)):
        with pytest.raises(UnreachableError, match=FULL):
            await asyncio.wait_for(Worker(queue, CONSUMER, print, settings_of(own_nats)).run(), SOON)
        with pytest.raises(UnreachableError, match=FULL):
            await asyncio.to_thread(JetStreamHook("nats_full").publish, [Job(b"")], queue=queue)
        reached, said = await asyncio.to_thread(JetStreamHook("nats_full").test_connection)
        assert (reached, FULL in said) == (False, True)


@pytest.mark.slow
async def test_a_limit_that_is_lowered_later_is_named_by_who_loses_the_connection(
    own_nats: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    own_nats.config = "max_connections: 4"
    own_nats.restart()
    async with connect(settings_of(own_nats, timeout=1)) as connection:
        queue = await make_queue(connection, "q")
        ran: list[Any] = []
        running = asyncio.create_task(Worker(queue, CONSUMER, ran.append, settings_of(own_nats)).run())
        await publish(connection, queue, [Job(b"", subject="q.jobs.a")])
        await eventually(lambda: ran)
        own_nats.config = "max_connections: -1"
        own_nats.reload()
        # Nobody is let in any more.
        await eventually(lambda: caplog.text.count(f"is lost, and tried again: {FULL}") == 2)
        with pytest.raises(PublishError) as caught:
            await publish(connection, queue, [Job(b"", subject="q.jobs.a")])
        assert FULL in str(caught.value.report.failures[0].error)
        with pytest.raises(TransientError, match=FULL):
            await connection.api("INFO")
        own_nats.config = "max_connections: 4"
        own_nats.reload()
        await eventually(lambda: len(own_nats.monitor("connz")["connections"]) == 2)
        await publish(connection, queue, [Job(b"", subject="q.jobs.a")])
        await eventually(lambda: len(ran) > 1)
        running.cancel()
        await asyncio.wait([running])


async def test_the_limits_of_an_account_are_named(own_nats: NatsServer) -> None:
    def limit(**limits: int) -> ConnectionSettings:
        text = ", ".join(f"{name}: {value}" for name, value in limits.items())
        own_nats.config = (
            f"accounts {{ A: {{ jetstream: enabled, users: [{{user: u, password: p}}], limits: {{ {text} }} }} }}"
        )
        own_nats.restart()
        return settings_of(own_nats, user="u", password="p")

    settings = limit(max_connections=1)
    await eventually(lambda: not own_nats.monitor("connz")["connections"])
    async with connect(settings):
        for open_it in (opened, opened_blocking):
            with pytest.raises(UnreachableError, match="maximum account active connections exceeded"):
                await open_it(settings)
    settings = limit(max_subscriptions=1)
    with pytest.raises(SubscriptionRefusedError, match="maximum subscriptions exceeded"):
        await asyncio.wait_for(Worker(small_queue("q"), CONSUMER, print, settings).run(), SOON)


@pytest.mark.parametrize(
    ("config", "job", "said"),
    [
        ("max_payload: 1000", Job(bytes(5_000), subject="q.jobs.a"), "maximum payload violation"),
        (
            "accounts { A: { jetstream: enabled, users: [{user: u, password: p}], limits: { max_payload: 1000 } } }",
            Job(bytes(5_000), subject="q.jobs.a"),
            "maximum payload violation",
        ),
        ("max_control_line: 512", Job(b"", subject="q.jobs." + "a" * 600), "maximum control line exceeded"),
    ],
    ids=["payload", "payload of the account", "control line"],
)
@pytest.mark.slow
async def test_a_message_for_which_the_server_ends_the_connection_is_named(
    own_nats: NatsServer, config: str, job: Job, said: str
) -> None:
    if is_known := not config.startswith("max_payload"):
        own_nats.config = config
        own_nats.restart()
    user = {"user": "u", "password": "p"} if "accounts" in config else {}
    async with connect(settings_of(own_nats, **user)) as connection:
        queue = await make_queue(connection, "q")
        if not is_known:
            # The server tells a client only as it connects.
            own_nats.config = config
            own_nats.reload()
            await eventually(lambda: "Reloaded: max_payload" in own_nats.log())
        with pytest.raises(PublishError) as caught:
            await publish(connection, queue, [job])
        text = str(caught.value).lower()
        assert said in text or "server's limit of 1000" in text
        # What fits is stored.
        await publish(connection, queue, [Job(b"", subject="q.jobs.b")])


@pytest.mark.slow
async def test_a_user_that_expires_is_refused_and_named(own_nats: NatsServer) -> None:
    expires = int(time.time()) + 3
    mode = operator_mode(make_pair(), expires=expires)
    own_nats.config = mode.config
    own_nats.restart()
    async with connect(settings_of(own_nats, credentials_secret=mode.credentials, timeout=1)) as connection:
        await eventually(lambda: "expired" in str(connection.last_error).lower() or not connection.is_connected)
        with pytest.raises(JetStreamProviderError, match=r"(?i)expired|authorization|refused"):
            await connection.api("INFO")
    with pytest.raises(AuthenticationError):
        await opened(settings_of(own_nats, credentials_secret=mode.credentials))


@pytest.mark.slow
async def test_a_slow_consumer_gets_its_connection_again(own_nats: NatsServer) -> None:
    own_nats.config = "max_pending: 262144\nmax_payload: 131072"
    own_nats.restart()
    got: list[bytes] = []
    async with connect(settings_of(own_nats)) as connection, connect(settings_of(own_nats)) as other:
        await connection.subscribe_raw("s.*", lambda subject, *_: got.append(subject))
        await connection.api("INFO")
        with socket.create_connection((LOOPBACK, own_nats.port)) as publisher:
            publisher.sendall(b"CONNECT {}\r\n" + b"".join([b"PUB s.a 65536\r\n" + bytes(65_536) + b"\r\n"] * 320))
            publisher.sendall(b"PING\r\n")
            said = b""
            # The event loop doesn't read meanwhile.
            while b"PONG" not in said:
                said += publisher.recv(65_536)
        await eventually(lambda: connection.reconnects == 1)
        await other.publish("s.b", b"")
        await eventually(lambda: b"s.b" in got)


class ReportingServer:
    """A server that lets clients in and ends the connection with a report when something is published on ``boom``."""

    def __init__(self, report: str, *, early: bool) -> None:
        self.report = f"-ERR '{report}'\r\n".encode()
        self.early = early
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        writer.write(b'INFO {"version":"2.15.0","max_payload":1048576,"headers":true}\r\n')
        if self.early:
            writer.write(self.report)
            writer.close()
            return
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            inboxes: dict[bytes, bytes] = {}
            while line := await reader.readline():
                words = line.split()
                match words[0].upper():
                    case b"PING":
                        writer.write(b"PONG\r\n")
                    case b"SUB":
                        inboxes[words[1].removesuffix(b"*")] = words[-1]
                    case b"PUB" | b"HPUB":
                        await reader.readexactly(int(words[-1]) + 2)
                        if words[1] == b"boom":
                            writer.write(self.report)
                            break
                        number = next(number for inbox, number in inboxes.items() if words[2].startswith(inbox))
                        writer.write(b"MSG %b %b 2\r\n{}\r\n" % (words[2], number))
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            writer.close()


@contextlib.asynccontextmanager
async def reporting_server(report: str, *, early: bool) -> AsyncIterator[tuple[ReportingServer, ConnectionSettings]]:
    scripted = ReportingServer(report, early=early)
    server = await asyncio.start_server(scripted.serve, LOOPBACK, 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield scripted, connection_settings({"servers": (f"nats://{LOOPBACK}:{port}",), "timeout": 1})
    finally:
        server.close()


TYPES: dict[str, type[JetStreamProviderError]] = {
    "subscription": SubscriptionRefusedError,
    "credentials": AuthenticationError,
    "address": ConnectionSettingsError,
    "encryption": TLSError,
    "transient": UnreachableError,
}
ENDING = {text: TYPES[kind] for text, kind in ERROR_KINDS.items() if kind != "permission"}


@pytest.mark.slow
@pytest.mark.parametrize(("said", "error"), ENDING.items(), ids=list(ENDING))
@pytest.mark.parametrize("spelled", [str, str.title])
async def test_each_report_before_the_handshake_is_named_as_what_it_is(
    said: str, error: type[JetStreamProviderError], spelled: Any
) -> None:
    async with reporting_server(spelled(said), early=True) as (_, settings):
        for open_it in (opened, opened_blocking):
            with pytest.raises(error) as caught:
                await open_it(settings)
            # Of the commonest, the error says what is wrong.
            assert said in str(caught.value).lower() or said == "authorization violation"
            assert isinstance(caught.value, TransientError if error is UnreachableError else TerminalError)


@pytest.mark.slow
@pytest.mark.parametrize("said", ENDING)
async def test_each_report_that_ends_a_connection_is_named_by_the_request_that_gets_no_answer(said: str) -> None:
    async with reporting_server(said, early=False) as (_, settings), connect(settings) as connection:
        with pytest.raises(JetStreamProviderError) as caught:
            await connection.request("boom")
        assert said in str(caught.value).lower()


async def test_what_a_message_says_is_no_report(own_nats: NatsServer) -> None:
    async with connect(settings_of(own_nats)) as connection:
        got: list[bytes] = []
        await connection.subscribe_raw("s", lambda *parts: got.append(parts[3]))
        await connection.publish("s", b"\r\n-ERR 'maximum connections exceeded'\r\n")
        await eventually(lambda: got)
        assert connection.reconnects == 0
        assert connection.last_error is None
