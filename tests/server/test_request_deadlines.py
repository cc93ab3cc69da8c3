"""No request that changes something reaches the server after its sender has given it up."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import connect, connection_settings
from airflow_provider_jetstream.jetstream.errors import DeadlineError, TransientError, UnreachableError
from testbed.certificates import make_tls
from testbed.face import stream_info
from testbed.nats_server import NatsServer
from testbed.ports import LOOPBACK
from testbed.queues import CONSUMER, eventually, make_queue, publish_jobs, pull_jobs, stored_count
from testbed.spark_face import BlockingConnection, NatsSocket
from testbed.tcp_proxy import tcp_proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from testbed.face import NatsPyConnection
    from testbed.tcp_proxy import TcpProxy

INFO = (
    b'INFO {"server_id":"x","version":"2.15.0","max_payload":67108864,"headers":true,"proto":1,"client_id":1,'
    b'"jetstream":true}\r\n'
)
ACCOUNT = b'{"type":"io.nats.jetstream.api.v1.account_info_response","api":{"level":5}}'


@asynccontextmanager
async def through_proxy(nats: NatsServer) -> AsyncIterator[tuple[TcpProxy, NatsPyConnection]]:
    async with (
        tcp_proxy(nats.port) as proxy,
        connect(connection_settings({"servers": (proxy.url,), "timeout": 5})) as connection,
    ):
        yield proxy, connection


async def test_nothing_that_is_requested_while_the_connection_is_lost_is_sent_later(
    nats: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    sequence, *_ = await publish_jobs(connection, queue, "ab")
    async with through_proxy(nats) as (proxy, cut):
        proxy.cut()
        await eventually(lambda: not cut.is_connected)
        delete = (f"$JS.API.STREAM.MSG.DELETE.{name}", b'{"seq":%d}' % sequence)
        with pytest.raises(UnreachableError, match=r"lost for 0\.2 s already, so nothing was sent on"):
            await cut.request(*delete, time_limit=0.2)
        with pytest.raises(UnreachableError, match="nothing was sent"):
            await cut.publish_acknowledged(f"{name}.jobs.plain", b"c", {"Nats-Msg-Id": "c"}, time_limit=0.2)
        with pytest.raises(UnreachableError, match="nothing was sent"):
            await cut.publish(f"{name}.jobs.plain", b"d")
        proxy.mend()
        assert await stored_count(cut, name) == 2
        await publish_jobs(cut, queue, "e")
        assert await stored_count(connection, name) == 3


@pytest.mark.slow
async def test_a_read_waits_until_the_connection_is_restored(nats: NatsServer, name: str) -> None:
    async with through_proxy(nats) as (proxy, connection):
        await make_queue(connection, name)
        proxy.cut()
        await eventually(lambda: not connection.is_connected)
        reading = asyncio.create_task(stream_info(connection, name))
        await asyncio.sleep(0.3)
        proxy.mend()
        assert (await reading)["config"]["name"] == name


@pytest.mark.slow
async def test_a_read_is_repeated_once_the_connection_is_restored_and_a_change_is_not(
    nats: NatsServer, name: str
) -> None:
    async with through_proxy(nats) as (proxy, connection):
        queue = await make_queue(connection, name, jobs="ab")

        async def lose(request: str) -> None:
            proxy.pause_at(request.encode())
            await proxy.found.wait()
            proxy.cut()
            proxy.drop()
            proxy.mend()

        reads = [("$JS.API.STREAM.INFO." + name, b""), (f"$JS.API.DIRECT.GET.{name}", b'{"seq":1}')] * 50
        one, many, _ = await asyncio.gather(
            stream_info(connection, name), connection.request_many(reads), lose("STREAM.INFO")
        )
        batch = connection.ask(
            f"$JS.API.DIRECT.GET.{name}", b'{"seq":1,"next_by_subj":">","batch":2}', lambda headers: b" 204 " in headers
        )
        answers, _ = await asyncio.gather(batch, lose("DIRECT.GET"))
        assert [body for _, body in answers] == [b"a", b"b", b""]
        assert one["state"]["messages"] == 2
        assert many[1::2] == [b"a"] * 50
        assert {name.encode() in answer for answer in many[::2] if isinstance(answer, bytes)} == {True}
        assert [answer for answer in many if not isinstance(answer, bytes)] == []
        change = connection.request(f"$JS.API.STREAM.PURGE.{name}", time_limit=2)
        with pytest.raises(DeadlineError, match=r"no answer on \$JS\.API\.STREAM\.PURGE"):
            await asyncio.gather(change, lose("STREAM.PURGE"))
        assert await stored_count(connection, name) == 2
        assert connection.reconnects == 3
        # A pull takes messages: one that is answered twice would take two.
        pull = connection.request(f"$JS.API.CONSUMER.MSG.NEXT.{name}.{CONSUMER}", time_limit=2)
        with pytest.raises(DeadlineError):
            await asyncio.gather(pull, lose("MSG.NEXT"))
        (first, second) = await pull_jobs(connection, queue, 2)
        assert (first.data, second.data) == (b"a", b"b")


@pytest.mark.slow
async def test_a_change_that_is_not_answered_ends_a_connection_that_is_silent(nats: NatsServer, name: str) -> None:
    async with through_proxy(nats) as (proxy, connection):
        await make_queue(connection, name)
        proxy.pause()
        with pytest.raises(DeadlineError, match=r"no answer on \$JS\.API\.STREAM\.PURGE"):
            await connection.request(f"$JS.API.STREAM.PURGE.{name}", time_limit=0.3)
        assert not connection.is_connected
        proxy.resume()
        assert await stored_count(connection, name) == 0
        assert connection.reconnects == 1


@pytest.mark.slow
async def test_a_silent_connection_with_tls_is_ended_and_restored(tmp_path: Path, name: str) -> None:
    tls = make_tls(tmp_path)
    with NatsServer(tls=tls) as nats:
        async with tcp_proxy(nats.port) as proxy:
            address = proxy.url.replace("nats://", "tls://")
            values = {"servers": (address,), "timeout": 5, "tls_ca_file": str(tls.ca)}
            async with connect(connection_settings(values)) as connection:
                await make_queue(connection, name, jobs="ab")
                proxy.pause()
                purges = [(f"$JS.API.STREAM.MSG.DELETE.{name}", b'{"seq":1}')] * 100
                connection.timeout = 0.3
                answers = await connection.request_many(purges)
                connection.timeout = 5
                assert {type(answer) for answer in answers} == {DeadlineError}
                proxy.drop()
                assert await stored_count(connection, name) == 2
                assert connection.reconnects == 1


@pytest.mark.slow
async def test_a_read_that_is_not_answered_leaves_the_connection_alone(nats: NatsServer, name: str) -> None:
    async with through_proxy(nats) as (proxy, connection):
        await make_queue(connection, name)
        proxy.pause()
        with pytest.raises(DeadlineError):
            await connection.request(f"$JS.API.STREAM.INFO.{name}", time_limit=0.2)
        proxy.resume()
        await stream_info(connection, name)
        assert connection.reconnects == 0


@pytest.mark.slow
async def test_a_change_that_nobody_answers_leaves_a_connection_alone_that_is_alive(
    connection: NatsPyConnection, name: str
) -> None:
    await connection.client.subscribe(name)
    with pytest.raises(DeadlineError):
        await connection.request(name, time_limit=0.2)
    await stream_info(connection, (await make_queue(connection, name)).name)
    assert connection.reconnects == 0


class StalledServer:
    """Answers the first requests of a connection, then reads nothing more until it is told to."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.received = bytearray()
        self.ended = asyncio.Event()
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.port == 0:
            # A second connection finds nobody.
            writer.transport.abort()
            return
        self.port = 0
        writer.write(INFO)
        while b"stall" not in self.received:
            line = await reader.readline()
            self.received += line
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
            elif line.startswith(b"SUB"):
                sid = line.split()[-1]
            elif line.startswith(b"PUB $JS.API.INFO"):
                reply = line.split()[2]
                writer.write(b"MSG %b %b %d\r\n%b\r\n" % (reply, sid, len(ACCOUNT), ACCOUNT))
        await self.reads.wait()
        try:
            while chunk := await reader.read(1 << 20):
                self.received += chunk
        except ConnectionError:
            pass
        self.ended.set()


async def assert_dropped(use: Callable[[str], Awaitable[None]]) -> None:
    """Have a client send more than the buffers hold, then a change, and read what arrives after its time limit."""
    stalled = StalledServer()
    server = await asyncio.start_server(stalled.serve, LOOPBACK, 0, limit=1 << 16)
    stalled.port = server.sockets[0].getsockname()[1]
    async with server:
        await use(f"nats://{LOOPBACK}:{stalled.port}")
        stalled.reads.set()
        await asyncio.wait_for(stalled.ended.wait(), 10)
    assert len(stalled.received) < 64 << 20
    assert b"STREAM.PURGE" not in stalled.received


@pytest.mark.slow
async def test_what_is_left_in_the_buffers_of_a_stalled_connection_is_dropped() -> None:
    async def use(url: str) -> None:
        async with connect(connection_settings({"servers": (url,), "timeout": 5})) as connection:
            await connection.publish("stall", b"")
            await connection.publish("big", bytes(48 << 20))
            with pytest.raises(DeadlineError):
                await connection.request("$JS.API.STREAM.PURGE.q", time_limit=0.3)

    await assert_dropped(use)


async def test_what_is_left_in_the_buffers_of_a_stalled_blocking_connection_is_dropped() -> None:
    def send(url: str) -> None:
        socket = NatsSocket(connection_settings({"servers": (url,), "timeout": 0.5}))
        connection = BlockingConnection(socket)

        async def purge() -> None:
            await connection.publish("stall", b"")
            await connection.publish("big", bytes(48 << 20))
            await connection.request("$JS.API.STREAM.PURGE.q")

        with pytest.raises(TransientError):
            connection.run(purge())
        assert connection.is_closed

    await assert_dropped(lambda url: asyncio.to_thread(send, url))


@pytest.mark.slow
async def test_a_silent_blocking_connection_is_given_up_after_a_change(nats: NatsServer, name: str) -> None:
    async with tcp_proxy(nats.port) as proxy:

        def purge() -> None:
            socket = NatsSocket(connection_settings({"servers": (proxy.url,), "timeout": 0.5}))
            connection = BlockingConnection(socket)
            connection.run(connection.api("INFO"))
            loop.call_soon_threadsafe(proxy.pause)
            time.sleep(0.1)
            with pytest.raises(DeadlineError):
                connection.run(connection.request(f"$JS.API.STREAM.INFO.{name}"))
            assert connection.is_connected
            with pytest.raises(DeadlineError):
                connection.run(connection.request(f"$JS.API.STREAM.PURGE.{name}"))
            assert isinstance(connection.broken, UnreachableError)

        loop = asyncio.get_running_loop()
        await asyncio.to_thread(purge)


async def test_a_blocking_connection_that_is_alive_is_kept_after_a_change_that_nobody_answers(
    nats: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    await connection.client.subscribe(name)
    await connection.client.flush()

    def ask() -> None:
        socket = NatsSocket(connection_settings({"servers": (nats.url,), "timeout": 0.3}))
        blocking = BlockingConnection(socket)
        with pytest.raises(DeadlineError):
            blocking.run(blocking.request(name))
        assert blocking.is_connected
        blocking.run(blocking.api("INFO"))
        socket.close()

    await asyncio.to_thread(ask)
