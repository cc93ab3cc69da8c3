"""What the server reports by -ERR reaches the request or the worker that caused it, as what it is: nothing waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
from contextlib import ExitStack
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
from airflow_provider_jetstream.jetstream.client.denials import ERROR_KINDS, connection_error, error_kind, is_refusal
from airflow_provider_jetstream.worker import Worker
from testbed.authentication import authenticating_server, make_pair, operator_mode
from testbed.nats_server import NatsServer
from testbed.ports import LOOPBACK, free_ports
from testbed.queues import CONSUMER, eventually, make_queue, small_queue
from testbed.spark_face import NatsSocket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue

# Nothing here may wait for it.
LIMIT = 60.0
SOON = 20.0
REFUSED = "maximum subscriptions exceeded"


def settings_of(server: NatsServer, **values: Any) -> ConnectionSettings:
    return connection_settings({"servers": (server.url,), "timeout": LIMIT, **values})


async def queue_of(server: NatsServer) -> WorkQueue:
    async with connect(settings_of(server)) as connection:
        return await make_queue(connection, "q", consumer={"ack_wait": "30s", "max_deliver": 3}, jobs=["a"])


@pytest.mark.slow
async def test_a_worker_that_gets_too_few_subscriptions_ends_at_once(own_nats: NatsServer) -> None:
    queue = await queue_of(own_nats)
    ran: list[Any] = []
    for most in range(1, 8):
        own_nats.config = f"max_subscriptions: {most}"
        own_nats.restart()
        with pytest.raises(SubscriptionRefusedError, match=REFUSED) as caught:
            await asyncio.wait_for(Worker(queue, CONSUMER, ran.append, settings_of(own_nats)).run(), SOON)
        assert caught.value.code == "JS107"
        assert isinstance(caught.value, TerminalError)
    assert ran == []


async def test_a_worker_with_fallbacks_that_gets_too_few_ends_at_once(own_nats: NatsServer) -> None:
    consumers = [
        {"name": name, "filter_subject": f"q.jobs.{name}", "max_deliver": 2, "ack_wait": "30s"} for name in ("a", "b")
    ]
    async with connect(settings_of(own_nats)) as connection:
        queue = await make_queue(connection, "q", consumers=consumers)
    for most in (4, 6, 7, 8):
        own_nats.config = f"max_subscriptions: {most}"
        own_nats.restart()
        worker = Worker(queue, "a", print, settings_of(own_nats), fallbacks=["b"])
        with pytest.raises(SubscriptionRefusedError, match=REFUSED):
            await asyncio.wait_for(worker.run(), SOON)


async def test_a_limit_that_is_lowered_while_a_worker_runs_ends_it(own_nats: NatsServer) -> None:
    queue = await queue_of(own_nats)
    ran: list[Any] = []
    worker = Worker(queue, CONSUMER, ran.append, settings_of(own_nats))
    running = asyncio.create_task(worker.run())
    await eventually(lambda: ran)
    own_nats.config = "max_subscriptions: 3"
    await asyncio.to_thread(own_nats.restart)
    with pytest.raises(SubscriptionRefusedError, match=REFUSED):
        await asyncio.wait_for(running, SOON)


async def test_the_refused_subscription_is_named_and_the_others_go_on(own_nats: NatsServer) -> None:
    own_nats.config = "max_subscriptions: 3\nmax_sub_tokens: 16"
    own_nats.restart()
    refused: list[JetStreamProviderError] = []
    got: list[bytes] = []
    async with connect(settings_of(own_nats)) as connection:

        def on_message(subject: bytes, _reply: bytes, _headers: bytes | None, _body: bytes) -> None:
            got.append(subject)

        await connection.api("INFO")
        # All at once: beside the inbox of requests the server takes two, and of the others says only that.
        subscriptions = await asyncio.gather(
            *(connection.subscribe_raw(f"s.{number}", on_message, refused.append) for number in range(5))
        )
        await eventually(lambda: len({str(error) for error in refused}) == 3)
        assert {getattr(error, "subject", "") for error in refused} == {"s.2", "s.3", "s.4"}
        for number in range(5):
            await connection.publish(f"s.{number}", b"")
        await eventually(lambda: len(got) == 2)
        assert sorted(got) == [b"s.0", b"s.1"]
        await connection.api("INFO")
        await subscriptions[0].unsubscribe()
        refused.clear()
        await connection.subscribe_raw("s." + "x." * 20 + "y", on_message, refused.append)
        await eventually(lambda: refused)
        assert isinstance(refused[0], SubscriptionRefusedError)
        assert "too many tokens" in str(refused[0])
        # There is room again.
        await connection.subscribe_raw("s.5", on_message, refused.append)
        await connection.publish("s.5", b"")
        await eventually(lambda: b"s.5" in got)
        assert connection.reconnects == 0


async def test_all_requests_together_need_one_subscription(own_nats: NatsServer) -> None:
    own_nats.config = "max_subscriptions: 1"
    own_nats.restart()
    async with connect(settings_of(own_nats)) as connection:
        await connection.api("INFO")
        assert len(await connection.ask("$JS.API.INFO")) == 1
        assert len(await connection.request_many([("$JS.API.INFO", b"")] * 2)) == 2
        refused = asyncio.get_running_loop().create_future()
        await connection.subscribe_raw("s", lambda *_: None, refused.set_result)
        assert isinstance(await asyncio.wait_for(refused, SOON), SubscriptionRefusedError)
        assert REFUSED in str(refused.result())


@pytest.mark.slow
async def test_another_port_of_the_server_is_a_wrong_address(own_nats: NatsServer) -> None:
    (number,) = free_ports(1)
    own_nats.config = f'leafnodes {{ listen: "127.0.0.1:{number}" }}'
    own_nats.restart()
    settings = connection_settings({"servers": (f"nats://127.0.0.1:{number}",), "timeout": 5})
    for open_it in (_connected, _blocking):
        with pytest.raises(ConnectionSettingsError, match="attempted to connect to leaf node port"):
            await open_it(settings)


async def _connected(settings: ConnectionSettings) -> None:
    async with connect(settings):
        pass


async def _blocking(settings: ConnectionSettings) -> None:
    with ExitStack() as stack:
        stack.callback((await asyncio.to_thread(NatsSocket, settings)).close)


def test_every_report_of_the_server_is_known_as_what_it_is() -> None:
    for text, kind in ERROR_KINDS.items():
        assert error_kind(f"nats: '{text.title()} (more)'") == kind
        assert is_refusal(text) == (kind == "credentials")
        error = connection_error("here", f"'{text}'")
        if kind in ("credentials", "permission"):
            assert error is None
        else:
            assert error
            assert text in str(error)
            assert isinstance(error, TransientError if kind == "transient" else TerminalError)
    assert error_kind("something new") is None


@pytest.mark.slow
async def test_credentials_that_expire_in_time_are_refused_and_a_slow_handshake_is_not() -> None:
    assert is_refusal("'User Authentication Expired'")
    assert not is_refusal("'Authentication Timeout'")
    with NatsServer(user="ann", password="right") as server:
        with pytest.raises(AuthenticationError):
            await _connected(settings_of(server, user="ann", password="wrong"))
        # A client that doesn't introduce itself is told, and may try again.
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            said = b""
            while b"-ERR" not in said and (part := client.recv(4096)):
                said += part
        assert b"Authentication Timeout" in said


# What the server says right before it ends a connection is what the worker, the hook and the publisher say.


FULL = "maximum connections exceeded"
TRIES = 5


def settings_of_connections(server: NatsServer, **values: Any) -> ConnectionSettings:
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
        settings = settings_of_connections(server, **values | {"servers": (server.url,)})
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
    async with connect(settings_of_connections(own_nats)):
        with pytest.raises(UnreachableError, match=FULL):
            await asyncio.wait_for(Worker(queue, CONSUMER, print, settings_of_connections(own_nats)).run(), SOON)
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
    async with connect(settings_of_connections(own_nats, timeout=1)) as connection:
        queue = await make_queue(connection, "q")
        ran: list[Any] = []
        running = asyncio.create_task(Worker(queue, CONSUMER, ran.append, settings_of_connections(own_nats)).run())
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
        return settings_of_connections(own_nats, user="u", password="p")

    settings = limit(max_connections=1)
    await eventually(lambda: not own_nats.monitor("connz")["connections"])
    async with connect(settings):
        for open_it in (opened, opened_blocking):
            with pytest.raises(UnreachableError, match="maximum account active connections exceeded"):
                await open_it(settings)
    settings = limit(max_subscriptions=1)
    async with connect(settings) as connection:
        refused = asyncio.get_running_loop().create_future()
        await connection.subscribe_raw("s", lambda *_: None, refused.set_result)
        assert "maximum subscriptions exceeded" in str(await asyncio.wait_for(refused, SOON))


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
    async with connect(settings_of_connections(own_nats, **user)) as connection:
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
    async with connect(settings_of_connections(own_nats, credentials_secret=mode.credentials, timeout=1)) as connection:
        await eventually(lambda: "expired" in str(connection.last_error).lower() or not connection.is_connected)
        with pytest.raises(JetStreamProviderError, match=r"(?i)expired|authorization|refused"):
            await connection.api("INFO")
    with pytest.raises(AuthenticationError):
        await opened(settings_of_connections(own_nats, credentials_secret=mode.credentials))


@pytest.mark.slow
async def test_a_slow_consumer_gets_its_connection_again(own_nats: NatsServer) -> None:
    own_nats.config = "max_pending: 262144\nmax_payload: 131072"
    own_nats.restart()
    got: list[bytes] = []
    async with (
        connect(settings_of_connections(own_nats)) as connection,
        connect(settings_of_connections(own_nats)) as other,
    ):
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
    async with connect(settings_of_connections(own_nats)) as connection:
        got: list[bytes] = []
        await connection.subscribe_raw("s", lambda *parts: got.append(parts[3]))
        await connection.publish("s", b"\r\n-ERR 'maximum connections exceeded'\r\n")
        await eventually(lambda: got)
        assert connection.reconnects == 0
        assert connection.last_error is None
