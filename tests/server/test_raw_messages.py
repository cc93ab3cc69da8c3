"""What is written encoded, and received as it is on the wire: the path of all that comes in numbers."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import connect, connection_settings
from airflow_provider_jetstream.jetstream.errors import (
    DeadlineError,
    PermissionDeniedError,
    UnreachableError,
)
from testbed.nats_server import NatsServer
from testbed.queues import eventually
from testbed.spark_face import BlockingConnection, NatsSocket

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.face import NatsPyConnection

Received = list[tuple[bytes, bytes, bytes | None, bytes]]


def encode_message(subject: bytes, body: bytes, headers: bytes = b"", reply: bytes = b"") -> bytes:
    """Encode a message for the wire: ``PUB``, or ``HPUB`` where it has headers."""
    if not headers:
        return b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(body), body)
    return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (subject, reply, len(headers), len(headers) + len(body), headers, body)


async def stream_of(connection: NatsPyConnection, name: str) -> None:
    await connection.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.>"], "storage": "memory"})


async def test_what_is_written_arrives_in_order_and_as_it_is(connection: NatsPyConnection, name: str) -> None:
    received: Received = []
    subscription = await connection.subscribe_raw(f"{name}.>", lambda *fields: received.append(fields))
    headers = b"NATS/1.0\r\nA: 1\r\n\r\n"
    sent: Received = []
    for number in range(5_000):
        subject, body = f"{name}.{number % 7}".encode(), b"\xff\r\nMSG x 1 2\r\n" * (number % 50)
        fields = (subject, b"reply" if number % 3 else b"", headers if number % 2 else None, body)
        sent.append(fields)
        connection.write(encode_message(subject, body, fields[2] or b"", fields[1]))
    # A message of a size that no read takes at once.
    large = os.urandom(900_000)
    sent.append((f"{name}.large".encode(), b"", None, large))
    connection.write(encode_message(f"{name}.large".encode(), large))
    await connection.wait_for_room()
    before = connection.client.stats["in_msgs"]
    await eventually(lambda: len(received) >= len(sent), within=30)
    assert received == sent
    assert connection.client.stats["in_msgs"] - before == len(sent)
    await subscription.unsubscribe()
    connection.write(encode_message(f"{name}.0".encode(), b"unheard"))
    await connection.client.flush()
    assert len(received) == len(sent)


async def test_a_callback_that_fails_costs_its_message_only(connection: NatsPyConnection, name: str) -> None:
    received: list[bytes] = []

    def note(_subject: bytes, _reply: bytes, _headers: bytes | None, payload: bytes) -> None:
        received.append(payload)
        if payload == b"bad":
            raise ValueError("bad")

    await connection.subscribe_raw(name, note)
    others: list[bytes] = []

    async def note_other(message: object) -> None:
        others.append(getattr(message, "data", b""))

    await connection.client.subscribe(name, cb=note_other)
    connection.write(b"".join(encode_message(name.encode(), body) for body in (b"a", b"bad", b"b")))
    await eventually(lambda: len(others) == 3)
    assert received == others == [b"a", b"bad", b"b"]


@pytest.mark.slow
async def test_a_raw_subscription_outlives_the_loss_of_its_connection(own_nats: NatsServer) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 30})) as connection:
        received: list[bytes] = []
        await connection.subscribe_raw("a", lambda *fields: received.append(fields[3]))
        await stream_of(connection, "s")
        assert len(await connection.request_many([("s.a", b"1")] * 3, [{}] * 3)) == 3
        own_nats.kill()
        await eventually(lambda: not connection.is_connected)
        with pytest.raises(UnreachableError, match="nothing was sent"):
            connection.write(encode_message(b"a", b"while it was lost"))
        await asyncio.to_thread(own_nats.start)
        await eventually(lambda: connection.is_connected)
        connection.write(encode_message(b"a", b"afterwards"))
        await eventually(lambda: bool(received))
        assert received == [b"afterwards"]
        # The inbox for answers, too.
        await stream_of(connection, "s")
        assert all(isinstance(answer, bytes) for answer in await connection.request_many([("s.a", b"1")] * 3, [{}] * 3))


async def test_many_requests_are_answered_each_in_its_place(connection: NatsPyConnection, name: str) -> None:
    await stream_of(connection, name)
    messages = [(f"{name}.{number}", b"%d" % number) for number in range(2_500)]
    messages[1_200] = (f"elsewhere.{name}", b"")
    messages[1_201] = (f"{name}.a b", b"")
    messages[1_202] = (f"{name}.a", bytes(connection.max_payload))
    answers = await connection.request_many(messages, [{"Nats-Msg-Id": str(number)} for number in range(2_500)])
    lost = [str(answer) for answer in answers if isinstance(answer, Exception)]
    assert [type(answers[number]) for number in (1_200, 1_201, 1_202)] == [UnreachableError] * 3
    assert lost[0] == f"no stream captures elsewhere.{name} just now"
    assert "without space, tab or line break" in lost[1]
    assert "more than the server's limit of 1048576" in lost[2]
    assert len(lost) == 3
    reads = [(f"$JS.API.STREAM.MSG.GET.{name}", b'{"seq":%d}' % (number + 1)) for number in range(1_200)]
    for number, answer in enumerate(await connection.request_many(reads)):
        assert isinstance(answer, bytes)
        assert f'"subject":"{name}.{number}"'.encode() in answer
    assert await connection.request_many([]) == []


async def test_no_more_than_a_thousand_requests_wait_for_an_answer(
    own_nats: NatsServer,
) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 30})) as connection:
        held: Received = []
        most = 0

        def hold(subject: bytes, reply: bytes, headers: bytes | None, payload: bytes) -> None:
            nonlocal most
            held.append((subject, reply, headers, payload))
            most = max(most, len(held))

        def answer() -> None:
            while held:
                responder.write(encode_message(held.pop()[1], b"done"))

        async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 30})) as responder:
            await responder.subscribe_raw("held", hold)
            await responder.client.flush()
            tasks = [asyncio.create_task(connection.request_many([("held", b"")] * 1_300)) for _ in range(2)]
            while not all(task.done() for task in tasks):
                seen = -1
                while seen != len(held):
                    seen = len(held)
                    await connection.client.flush()
                    await responder.client.flush()
                answer()
                await asyncio.sleep(0.01)
            assert [await task for task in tasks] == [[b"done"] * 1_300] * 2
    assert most == 1_000


@pytest.mark.slow
async def test_requests_of_a_server_that_stalls_are_not_sent_later(own_nats: NatsServer) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 1})) as connection:
        await stream_of(connection, "s")
        pid = own_nats.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            answers = await connection.request_many([("s.a", bytes(100_000))] * 40, [{}] * 40)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert DeadlineError in {type(answer) for answer in answers} <= {DeadlineError, UnreachableError}
        await eventually(lambda: connection.is_connected, within=30)
        counts = [-1]

        async def stored_all_that_it_had() -> bool:
            counts.append((await connection.api("STREAM.INFO.s", time_limit=30))["state"]["messages"])
            await asyncio.sleep(0.3)
            return counts[-1] == counts[-2]

        # What the server had received when it stalled is stored, after a while on a busy machine; the rest never is.
        await eventually(stored_all_that_it_had, within=30)
        assert counts[-1] < 40


async def test_a_cancelled_group_makes_room_for_others(connection: NatsPyConnection, name: str) -> None:
    await connection.subscribe_raw(name, lambda *_: None)
    task = asyncio.create_task(connection.request_many([(name, b"")] * 1_000))
    other = asyncio.create_task(connection.request_many([("$JS.API.INFO", b"")] * 10))
    await asyncio.sleep(0.05)
    assert not other.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(await other) == 10


async def test_a_denied_request_of_many_is_named() -> None:
    policy = '{user: u, password: p, permissions: {publish: {deny: ["denied.>"]}}}'
    with NatsServer(config=f"authorization {{ users: [{policy}] }}") as server:
        values = {"servers": (server.url,), "user": "u", "password": "p", "timeout": 60}
        async with connect(connection_settings(values)) as connection:
            requests = [("$JS.API.INFO", b""), ("denied.a", b""), ("$JS.API.INFO", b"")]
            with pytest.raises(PermissionDeniedError) as caught:
                await connection.request_many(requests)
            assert (caught.value.action, caught.value.subject) == ("publish", "denied.a")
            assert len(await connection.request_many(requests[::2])) == 2


async def test_an_inbox_that_is_denied_for_a_time_is_named_and_opened_anew_afterwards() -> None:
    def users(permissions: str) -> str:
        return f"authorization {{ users: [{{user: u, password: p, permissions: {{{permissions}}}}}] }}"

    with NatsServer(config=users("")) as server:
        values = {"servers": (server.url,), "user": "u", "password": "p", "timeout": 60}
        async with connect(connection_settings(values)) as connection:
            server.config = users('subscribe: {deny: ["_INBOX.>"]}')
            server.reload()
            await eventually(lambda: "_INBOX." in str(connection.last_error))
            with pytest.raises(PermissionDeniedError, match="on which answers would arrive"):
                await connection.request_many([("$JS.API.INFO", b"")] * 3)
            server.config = users("")
            server.reload()

            async def is_answered() -> bool:
                with suppress(PermissionDeniedError):
                    return len(await connection.request_many([("$JS.API.INFO", b"")] * 3)) == 3
                return False

            await eventually(is_answered)


def test_a_blocking_connection_writes_encoded_messages_too(settings: ConnectionSettings, name: str) -> None:
    socket = NatsSocket(settings)
    blocking = BlockingConnection(socket)

    async def store() -> object:
        await blocking.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.>"], "storage": "memory"})
        blocking.write(b"".join(encode_message(f"{name}.{number}".encode(), b"") for number in range(2_000)))
        await blocking.wait_for_room()
        await blocking.drop_unsent()
        return await blocking.api("INFO")

    async def stored() -> int:
        return int((await blocking.api(f"STREAM.INFO.{name}"))["state"]["messages"])

    assert blocking.run(store())
    # Received isn't stored yet.
    while blocking.run(stored()) < 2_000:
        time.sleep(0.01)
    socket.close()
    with pytest.raises(UnreachableError):
        blocking.run(store())
    with pytest.raises(UnreachableError):
        blocking.write(b"")
