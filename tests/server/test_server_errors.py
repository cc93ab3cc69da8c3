"""What the server reports by -ERR reaches the request or the worker that caused it, as what it is: nothing waits."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    AuthenticationError,
    ConnectionSettingsError,
    JetStreamProviderError,
    SubscriptionRefusedError,
    TerminalError,
    TransientError,
    UnreachableError,
    connect,
    connection_settings,
)
from airflow_provider_jetstream.jetstream.client.denials import ERROR_KINDS, connection_error, error_kind, is_refusal
from airflow_provider_jetstream.worker import Worker
from testbed.nats_server import NatsServer
from testbed.ports import free_ports
from testbed.queues import CONSUMER, eventually, make_queue, publish_jobs
from testbed.spark_face import NatsSocket

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue

# Nothing here may wait for it.
LIMIT = 60.0
SOON = 20.0
REFUSED = "maximum subscriptions exceeded"


def settings_of(server: NatsServer, **values: Any) -> ConnectionSettings:
    return connection_settings({"servers": (server.url,), "timeout": LIMIT, **values})


async def queue_of(server: NatsServer) -> WorkQueue:
    async with connect(settings_of(server)) as connection:
        queue = await make_queue(connection, "q", consumer={"ack_wait": "30s", "max_deliver": 3})
        await publish_jobs(connection, queue, ["a"])
    return queue


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
    own_nats.config = "max_subscriptions: 4\nmax_sub_tokens: 16"
    own_nats.restart()
    refused: list[JetStreamProviderError] = []
    got: list[bytes] = []
    async with connect(settings_of(own_nats)) as connection:

        def on_message(subject: bytes, _reply: bytes, _headers: bytes | None, _body: bytes) -> None:
            got.append(subject)

        await connection.api("INFO")
        # All at once: beside the inboxes of requests the server takes two, and of the others says only that.
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


async def test_requests_beyond_the_limit_fail_at_once(own_nats: NatsServer) -> None:
    own_nats.config = "max_subscriptions: 2"
    own_nats.restart()
    async with connect(settings_of(own_nats)) as connection:
        await connection.api("INFO")
        with pytest.raises(SubscriptionRefusedError, match=REFUSED):
            await asyncio.wait_for(connection.request_status("$JS.API.INFO", b""), SOON)
        with pytest.raises(SubscriptionRefusedError, match=REFUSED):
            await asyncio.wait_for(connection.request_batch("$JS.API.INFO", b""), SOON)


@pytest.mark.slow
async def test_a_server_with_as_many_connections_as_it_takes_is_transient(own_nats: NatsServer) -> None:
    own_nats.config = "max_connections: 1"
    own_nats.restart()
    async with connect(settings_of(own_nats)):
        with pytest.raises(UnreachableError) as caught:
            async with connect(settings_of(own_nats, timeout=1)):
                pass
        assert isinstance(caught.value, TransientError)
        with pytest.raises(UnreachableError):
            NatsSocket(settings_of(own_nats, timeout=1))


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
