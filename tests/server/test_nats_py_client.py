"""nats-py's client over the package's connection."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest
from nats.errors import (
    ConnectionReconnectingError,
    FlushTimeoutError,
    MaxPayloadError,
    NoRespondersError,
)
from nats.errors import TimeoutError as NatsTimeoutError

from airflow_provider_jetstream.jetstream import connect, connection_settings
from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError
from testbed.queues import CONSUMER, eventually, make_queue, publish_jobs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from nats.aio.msg import Msg
    from pytest_mock import MockerFixture

    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer


@pytest.fixture
async def connection(settings: ConnectionSettings) -> AsyncIterator[NatsPyConnection]:
    async with connect(settings) as opened:
        yield opened


def tcp_connections(server: NatsServer) -> int:
    return int(server.monitor("connz")["num_connections"])


async def test_the_client_and_the_package_share_one_connection_to_the_server(own_nats: NatsServer) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,)})) as connection:
        assert tcp_connections(own_nats) == 1
        await connection.client.jetstream().account_info()
        await connection.client.force_reconnect()
        await eventually(lambda: connection.client.is_connected and connection.reconnects == 1)
        assert tcp_connections(own_nats) == 1
    await eventually(lambda: tcp_connections(own_nats) == 0)
    assert connection.client.is_closed


async def test_a_program_pulls_and_acknowledges_by_nats_py(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await publish_jobs(connection, queue, ["a", "b"], headers={"A": "1"})
    pull = await connection.client.jetstream().pull_subscribe_bind(CONSUMER, stream=name)
    messages = await pull.fetch(2, timeout=5)
    assert [(message.data, message.headers) for message in messages] == [(b"a", {"A": "1"}), (b"b", {"A": "1"})]
    await messages[0].ack_sync()
    await messages[1].ack()
    await connection.client.flush()
    with pytest.raises(NatsTimeoutError):
        await pull.fetch(1, timeout=0.2)
    assert (await connection.api(f"STREAM.INFO.{name}"))["state"]["messages"] == 0


async def test_what_is_sent_after_a_subscription_arrives_there(connection: NatsPyConnection, name: str) -> None:
    messages = await connection.client.subscribe(f"{name}.>")
    await connection.publish(f"{name}.a", b"of the package")
    await connection.client.publish(f"{name}.b", b"of nats-py", reply="r", headers={"A": "é"})
    first, second = [await messages.next_msg(timeout=5) for _ in range(2)]
    assert (first.data, first.headers) == (b"of the package", None)
    assert (second.data, second.reply, second.headers) == (b"of nats-py", "r", {"A": "é"})
    await messages.unsubscribe()
    await connection.client.force_reconnect()
    again = await connection.client.subscribe(f"{name}.>")
    await eventually(lambda: connection.client.is_connected)
    await connection.client.publish(f"{name}.c", b"")
    assert (await again.next_msg(timeout=5)).subject == f"{name}.c"


@pytest.mark.parametrize("subject", ["a\v\f\x1c", "\udcff", "\U0010ff01", "é\u00a0\u2028", "a\x7f"])
async def test_a_subject_of_any_bytes_is_read_as_it_is(connection: NatsPyConnection, name: str, subject: str) -> None:
    messages = await connection.client.subscribe(f"{name}.>")
    await connection.publish(f"{name}.{subject}", b"odd", reply=f"reply.{subject}")
    message = await messages.next_msg(timeout=5)
    assert (message.subject, message.reply) == (f"{name}.{subject}", f"reply.{subject}")
    await connection.client.publish(message.subject, b"back")
    assert (await messages.next_msg(timeout=5)).subject == message.subject


async def test_requests_end_with_what_nats_py_raises(connection: NatsPyConnection, name: str) -> None:
    client = connection.client

    async def answer(message: Msg) -> None:
        await message.respond(message.data + b"!")

    await client.subscribe(f"{name}.answered", cb=answer)
    await client.subscribe(f"{name}.silent")
    for old_style in (False, True):
        assert (await client.request(f"{name}.answered", b"a", timeout=5, old_style=old_style)).data == b"a!"
        with pytest.raises(NatsTimeoutError):
            await client.request(f"{name}.silent", timeout=0.05, old_style=old_style)
        with pytest.raises(NoRespondersError):
            await client.request(f"{name}.nobody", timeout=5, old_style=old_style)
    with pytest.raises(MaxPayloadError):
        await client.publish(name, b"x" * (client.max_payload + 1))
    await connection.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.>"], "allow_direct": True})
    missing = await client.request(f"$JS.API.DIRECT.GET.{name}", b'{"seq": 7}', timeout=5)
    assert missing.headers == {"Status": "404", "Description": "Message Not Found"}


async def test_a_flush_for_which_nobody_waits_any_more_leaves_the_connection_open(
    connection: NatsPyConnection, name: str
) -> None:
    messages = await connection.client.subscribe(name)
    for _ in range(3):
        flushing = asyncio.create_task(connection.client.flush())
        await asyncio.sleep(0)
        flushing.cancel()
        await asyncio.wait([flushing])
    with pytest.raises(FlushTimeoutError):
        await connection.client.flush(timeout=1e-9)
    assert await connection.client.rtt() > 0
    await connection.client.publish(name, b"later")
    assert (await messages.next_msg(timeout=5)).data == b"later"
    assert connection.reconnects == 0


async def test_nothing_is_sent_later_over_another_connection(own_nats: NatsServer) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 5})) as connection:
        messages = await connection.client.subscribe("a")
        own_nats.kill()
        await eventually(lambda: not connection.is_connected)
        for _ in range(3):
            with pytest.raises(ConnectionReconnectingError):
                await connection.client.publish("a", b"early")
            with pytest.raises(ConnectionReconnectingError):
                await connection.client.request("a", b"early")
            with pytest.raises(ConnectionReconnectingError):
                await connection.client.flush()
        await asyncio.to_thread(own_nats.restart)
        await eventually(lambda: connection.client.is_connected and connection.is_connected, within=20)
        await connection.client.flush()
        await connection.client.publish("a", b"late")
        assert (await messages.next_msg(timeout=5)).data == b"late"


async def test_a_denied_request_ends_at_once(own_nats: NatsServer) -> None:
    own_nats.config = (
        "accounts { A { jetstream: enabled, users: [{ user: u, password: p, permissions: {"
        ' publish: { deny: ["no.>"] }, subscribe: { deny: ["secret.>"] } } }] } }'
    )
    own_nats.restart()
    settings = connection_settings({"servers": (own_nats.url,), "user": "u", "password": "p"})
    async with connect(settings) as connection:
        with pytest.raises(PermissionDeniedError, match=r"publish to no\.a"):
            await connection.client.request("no.a", timeout=30)
        await connection.client.subscribe("secret.a")
        await eventually(lambda: "secret.a" in str(connection.last_error))
        assert (await connection.client.jetstream().account_info()).streams == 0
        assert connection.reconnects == 0


async def test_too_many_subscriptions_cost_only_the_last(own_nats: NatsServer) -> None:
    own_nats.config = "max_subscriptions: 2"
    own_nats.restart()
    async with connect(connection_settings({"servers": (own_nats.url,)})) as connection:
        messages = await connection.client.subscribe("a")
        await connection.client.subscribe("b")
        await connection.client.subscribe("c")
        await eventually(lambda: "maximum subscriptions exceeded" in str(connection.last_error))
        await connection.client.publish("a", b"x")
        assert (await messages.next_msg(timeout=5)).data == b"x"
        assert not connection.is_closed


async def test_a_stranger_on_this_machine_gets_nothing_of_the_connection(
    settings: ConnectionSettings, name: str, mocker: MockerFixture
) -> None:
    relays = mocker.spy(asyncio, "start_server")
    async with connect(settings) as connection:
        messages = await connection.client.subscribe(f"{name}.>")
        (address,) = (server.getsockname() for server in relays.spy_return.sockets)
        for lines in (
            f"SUB {name}.> 1\r\nPING\r\n",
            f"PUB {name}.a 5\r\nforge\r\nPING\r\n",
            f'CONNECT {{"auth_token": "0"}}\r\nPUB {name}.a 5\r\nforge\r\nSUB {name}.> 1\r\nPING\r\n',
            f"CONNECT []\r\nPUB {name}.a 5\r\nforge\r\n",
            f"CONNECT\r\nPUB {name}.a 5\r\nforge\r\n",
            "\r\n" * 3,
        ):
            reader, writer = await asyncio.open_connection(*address)
            assert (await reader.readline()).startswith(b"INFO ")
            writer.write(lines.encode())
            # Nothing but the end of the connection.
            async with asyncio.timeout(5):
                assert await reader.read() == b""
            writer.close()
        await connection.publish(f"{name}.b", b"own")
        assert (await messages.next_msg(timeout=5)).data == b"own"
        assert connection.client.is_connected
    with pytest.raises(OSError, match="refused"), socket.socket() as stranger:
        stranger.connect(address)
