from __future__ import annotations

import asyncio
import re
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import connect, connection_settings, get_message
from airflow_provider_jetstream.jetstream.client.message_reader import follow, next_message
from airflow_provider_jetstream.jetstream.errors import NotFoundError, UnreachableError
from testbed import seams
from testbed.face import consumer_info
from testbed.queues import eventually, make_queue, publish_jobs, pull_jobs

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.face import NatsPyConnection, StoredMessage
    from testbed.nats_server import NatsServer


async def make_stream(connection: NatsPyConnection, name: str) -> None:
    await connection.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.>"]})


async def publish_bodies(connection: NatsPyConnection, name: str, *kinds: str) -> None:
    for kind in kinds:
        await connection.client.jetstream().publish(f"{name}.{kind}", kind.encode())


async def collect(connection: NatsPyConnection, name: str, subject: str, start: int, count: int) -> list[StoredMessage]:
    collected: list[StoredMessage] = []
    async with asyncio.timeout(30), aclosing(follow(connection, name, subject, start)) as messages:
        async for message in messages:
            collected.append(message)
            if len(collected) == count:
                break
    return collected


async def test_times_keep_the_servers_nanoseconds(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    sequences = await publish_jobs(connection, queue, "abcdefgh")
    delivered = {message.metadata.sequence.stream: message for message in await pull_jobs(connection, queue, 8)}
    messages = [message for sequence in sequences if (message := await get_message(connection, name, sequence))]
    # The server drops trailing zeros, so one time may be shorter, but hardly all eight.
    assert any(re.search(r"\.\d{7,9}Z$", message.time) for message in messages)
    for message in messages:
        nanoseconds = int(delivered[message.sequence].reply.split(".")[7])
        second, _, fraction = message.time.removesuffix("Z").partition(".")
        assert int(fraction.ljust(9, "0")) == nanoseconds % 1_000_000_000
        assert message.stored_at.timestamp() == pytest.approx(nanoseconds / 1e9, abs=2e-6)
        assert second.endswith(f"{nanoseconds // 1_000_000_000 % 60:02d}")


async def test_the_next_message_by_subject_skips_other_subjects_and_deleted_ones(
    connection: NatsPyConnection, name: str
) -> None:
    await make_stream(connection, name)
    await publish_bodies(connection, name, "a", "b", "a", "b", "a", "b")
    for sequence in (3, 4):
        await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": sequence})

    async def sequences(subject: str) -> list[int]:
        collected, start = [], 1
        while message := await next_message(connection, name, start, subject):
            collected.append(message.sequence)
            start = message.sequence + 1
        return collected

    assert await sequences(f"{name}.a") == [1, 5]
    assert await sequences(f"{name}.b") == [2, 6]
    assert await sequences(f"{name}.*") == [1, 2, 5, 6]
    assert await sequences(f"{name}.none") == []


async def test_deleted_and_never_stored_messages_are_none(connection: NatsPyConnection, name: str) -> None:
    await make_stream(connection, name)
    assert await get_message(connection, name, 1) is None
    assert await next_message(connection, name, 1, f"{name}.>") is None
    await publish_bodies(connection, name, "a")
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": 1})
    assert await get_message(connection, name, 1) is None
    assert await get_message(connection, name, 999) is None


async def test_a_missing_stream_is_named_with_the_remedy(connection: NatsPyConnection, name: str) -> None:
    expected = f"expected stream {name} on the server, found none: provision the queue first, or check the name"
    for call in (
        get_message(connection, name, 1),
        next_message(connection, name, 1, ">"),
        anext(follow(connection, name, f"{name}.>", 1)),
    ):
        with pytest.raises(NotFoundError, match=re.escape(expected)):
            await call


async def test_a_missing_consumer_is_named_with_its_stream(connection: NatsPyConnection, name: str) -> None:
    expected = f"CONSUMER.INFO.{name}.other, found none"
    with pytest.raises(NotFoundError, match=expected):
        await consumer_info(connection, name, "other")
    await make_stream(connection, name)
    with pytest.raises(NotFoundError, match=expected):
        await consumer_info(connection, name, "other")


@pytest.mark.slow
async def test_following_two_concurrent_publishers_gives_each_message_once_and_in_order(
    connection: NatsPyConnection, name: str
) -> None:
    await make_stream(connection, name)
    reader = asyncio.create_task(collect(connection, name, f"{name}.*", 1, 2000))

    async def publish(kind: str) -> None:
        jetstream = connection.client.jetstream()
        for number in range(1000):
            await jetstream.publish(f"{name}.{kind}", str(number).encode())

    await asyncio.gather(publish("a"), publish("b"))
    messages = await reader
    assert [message.sequence for message in messages] == list(range(1, 2001))
    for kind in "ab":
        bodies = [int(message.data) for message in messages if message.subject == f"{name}.{kind}"]
        assert bodies == list(range(1000))


@pytest.mark.slow
async def test_following_misses_nothing_over_a_kill_and_a_restart_of_the_server(
    own_nats: NatsServer, name: str
) -> None:
    settings = connection_settings({"servers": (own_nats.url,), "timeout": 5})
    async with connect(settings) as reading_connection:
        await make_stream(reading_connection, name)
        await publish_bodies(reading_connection, name, "a")
        reader = asyncio.create_task(collect(reading_connection, name, f"{name}.>", 1, 5))
        await eventually(lambda: subscribed(own_nats, f"{name}.>"))
        own_nats.kill()
        await asyncio.to_thread(own_nats.restart)
        # Stored while the reader's own connection is still lost.
        async with connect(settings) as other:
            await publish_bodies(other, name, "a", "a")
        await eventually(lambda: reading_connection.client.is_connected)
        await publish_bodies(reading_connection, name, "a", "a")
        assert [message.sequence for message in await reader] == [1, 2, 3, 4, 5]


@pytest.mark.slow
async def test_following_repeats_nothing_after_a_long_outage(
    own_nats: NatsServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.MESSAGE_READER_RETRY_PAUSE, 0.01)
    async with connect(connection_settings({"servers": (own_nats.url,)})) as connection:
        await make_stream(connection, name)
        await publish_bodies(connection, name, "a")
        connection.timeout = 0.05
        async with asyncio.timeout(20), aclosing(follow(connection, name, f"{name}.>", 1)) as messages:
            assert (await anext(messages)).sequence == 1
            own_nats.kill()
            waiting = asyncio.ensure_future(anext(messages))
            # Longer than all attempts of one read take together.
            done, _ = await asyncio.wait([waiting], timeout=1)
            assert not done
            await asyncio.to_thread(own_nats.restart)
            await eventually(lambda: connection.client.is_connected)
            await publish_bodies(connection, name, "a")
            assert (await waiting).sequence == 2


@pytest.mark.slow
async def test_following_starts_while_the_server_is_down(
    own_nats: NatsServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.MESSAGE_READER_RETRY_PAUSE, 0.01)
    async with connect(connection_settings({"servers": (own_nats.url,)})) as connection:
        await make_stream(connection, name)
        await publish_bodies(connection, name, "a")
        connection.timeout = 0.05
        own_nats.kill()
        await eventually(lambda: not connection.client.is_connected)
        reader = asyncio.create_task(collect(connection, name, f"{name}.>", 1, 1))
        done, _ = await asyncio.wait([reader], timeout=1)
        assert not done
        await asyncio.to_thread(own_nats.restart)
        assert [message.sequence for message in await reader] == [1]


async def test_following_over_a_closed_connection_is_refused(settings: ConnectionSettings, name: str) -> None:
    async with connect(settings) as connection:
        pass
    with pytest.raises(UnreachableError, match=f"{name} can't be followed: nats: connection closed; open a new"):
        await anext(follow(connection, name, f"{name}.>", 1))


async def test_following_ends_with_an_error_once_its_connection_is_closed(own_nats: NatsServer, name: str) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 2})) as connection:
        await make_stream(connection, name)
        reader = asyncio.create_task(collect(connection, name, f"{name}.>", 1, 1))
        await eventually(lambda: subscribed(own_nats, f"{name}.>"))
        await connection.client.close()
        with pytest.raises(UnreachableError, match=f"the connection is closed while following {name}"):
            await reader


async def test_following_ends_with_an_error_once_its_stream_is_deleted(connection: NatsPyConnection, name: str) -> None:
    await make_stream(connection, name)
    reader = asyncio.create_task(collect(connection, name, f"{name}.>", 1, 1))
    await connection.api(f"STREAM.DELETE.{name}")
    with pytest.raises(NotFoundError, match=f"expected stream {name} on the server"):
        await reader


async def test_following_unsubscribes_when_it_is_closed(own_nats: NatsServer, name: str) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,)})) as connection:
        await make_stream(connection, name)
        await publish_bodies(connection, name, "a")
        messages = follow(connection, name, f"{name}.>", 1)
        await anext(messages)
        await eventually(lambda: subscribed(own_nats, f"{name}.>"))
        await messages.aclose()
        await eventually(lambda: not subscribed(own_nats, f"{name}.>"))


def subscribed(server: NatsServer, subject: str) -> bool:
    """Return whether a client subscribes; the server's own stream subscribes in another account."""
    connections = server.monitor("connz?subs=1")["connections"]
    return any(subject in connection.get("subscriptions_list", []) for connection in connections)
