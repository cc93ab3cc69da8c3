"""Messages are read by sequence, by subject, in ranges and ahead, each as the server stores it."""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Selection,
    connect,
    connection_settings,
    get_message,
)
from airflow_provider_jetstream.jetstream.client.stream_api import SequenceSet, stored_sequences
from airflow_provider_jetstream.jetstream.client.streams import (
    Streams,
    find_exact_streams,
    follow,
    next_message,
    read_range,
)
from airflow_provider_jetstream.jetstream.errors import NotFoundError, UnreachableError
from testbed import seams
from testbed.dead_letters import change_stream, publish_raw
from testbed.face import Scan, consumer_info
from testbed.queues import (
    eventually,
    make_dead_letters,
    make_queue,
    publish_jobs,
    pull_jobs,
    stored_count,
    until_stored,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream import Connection, ConnectionSettings, DeadLetter, WorkQueue
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
    monkeypatch.setattr(seams.STREAMS_RETRY_PAUSE, 0.01)
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
    monkeypatch.setattr(seams.STREAMS_RETRY_PAUSE, 0.01)
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


# Reads ranges of stored messages, and calls coroutine functions concurrently.


async def make_stream_range(connection: NatsPyConnection, name: str, subjects: list[str], body: bytes = b"") -> None:
    await connection.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.>"], "storage": "memory"})
    for number, subject in enumerate(subjects, 1):
        await connection.client.publish(f"{name}.{subject}", body or str(number).encode())
    await until_stored(connection, name, len(subjects))


async def read_sequences(
    connection: NatsPyConnection, name: str, subject: str = ">", start: int = 1, stop: int | None = None
) -> list[int]:
    return [message.sequence async for message in read_range(connection, name, subject, start, stop)]


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 34, 700])
async def test_a_whole_stream_is_read_in_order(connection: NatsPyConnection, name: str, count: int) -> None:
    await make_stream_range(connection, name, ["a"] * count)
    assert await read_sequences(connection, name) == list(range(1, count + 1))


async def test_a_range_is_read(connection: NatsPyConnection, name: str) -> None:
    await make_stream_range(connection, name, ["a"] * 100)
    assert await read_sequences(connection, name, start=40, stop=60) == list(range(40, 61))
    assert await read_sequences(connection, name, start=90) == list(range(90, 101))
    assert await read_sequences(connection, name, start=101) == []
    assert await read_sequences(connection, name, stop=0) == []
    assert await read_sequences(connection, name, start=99, stop=1_000) == [99, 100]


@pytest.mark.slow
async def test_other_subjects_and_deleted_messages_are_skipped(connection: NatsPyConnection, name: str) -> None:
    await make_stream_range(connection, name, ["a" if number % 7 == 0 else "b" for number in range(1, 501)])
    matching = [number for number in range(1, 501) if number % 7 == 0]
    assert await read_sequences(connection, name, f"{name}.a") == matching
    for sequence in (*range(1, 60), *range(200, 420), 500):
        await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": sequence, "no_erase": True})
    left = [number for number in range(60, 500) if not 200 <= number < 420]
    assert await read_sequences(connection, name) == left
    assert await read_sequences(connection, name, f"{name}.*") == left
    assert await read_sequences(connection, name, f"{name}.a") == [number for number in left if number % 7 == 0]
    assert await read_sequences(connection, name, f"{name}.c") == []


async def test_few_matching_messages_among_many_take_few_requests(connection: NatsPyConnection, name: str) -> None:
    await make_stream_range(connection, name, ["a" if number % 500 == 0 else "b" for number in range(1, 5_001)])
    before = connection.client.stats["out_msgs"]
    assert await read_sequences(connection, name, f"{name}.a") == list(range(500, 5_001, 500))
    assert connection.client.stats["out_msgs"] - before < 100


@pytest.mark.slow
async def test_many_matching_messages_take_about_one_request_each(connection: NatsPyConnection, name: str) -> None:
    await make_stream_range(connection, name, ["a"] * 5_000)
    before = connection.client.stats["out_msgs"]
    assert len(await read_sequences(connection, name)) == 5_000
    assert connection.client.stats["out_msgs"] - before < 5_100


@pytest.mark.slow
async def test_large_messages_are_read_a_few_at_a_time(connection: NatsPyConnection, name: str) -> None:
    await make_stream_range(connection, name, ["a"] * 100, b"x" * 700_000)
    assert await read_sequences(connection, name) == list(range(1, 101))


async def test_messages_that_are_stored_during_a_read_are_not_read(connection: NatsPyConnection, name: str) -> None:
    await make_stream_range(connection, name, ["a"] * 50)
    sequences: list[int] = []
    async for message in read_range(connection, name):
        sequences.append(message.sequence)
        await connection.client.publish(f"{name}.a", b"more")
    assert sequences == list(range(1, 51))


async def test_a_missing_stream_is_named(connection: NatsPyConnection, name: str) -> None:
    with pytest.raises(NotFoundError, match=f"expected stream {name}"):
        await read_sequences(connection, name)
    with pytest.raises(NotFoundError, match=f"expected stream {name}"):
        await read_sequences(connection, name, stop=5)


# Read-ahead finds the same letters as single reads, with far fewer requests.


QUEUE = {"consumer": {"ack_wait": "1s"}}


async def scan_all(connection: Connection, queue: WorkQueue) -> list[DeadLetter]:
    """Scan all letters."""
    scan = await Scan.begin(connection, queue)
    return [letter async for page in scan.pages(Selection()) for letter in page.letters]


@pytest.mark.slow
async def test_far_fewer_requests_are_sent_where_direct_gets_are_exact(own_nats: NatsServer, name: str) -> None:
    requests = []
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 5})) as connection:
        queue = await make_queue(connection, name, allow_direct=True, **QUEUE)
        await make_dead_letters(connection, queue, map(str, range(400)))
        streams = {queue.name, *queue.companion_names()}
        for reader in (connection, await find_exact_streams(connection, streams)):
            before = own_nats.monitor("varz")["in_msgs"]
            assert len(await scan_all(reader, queue)) == 400
            requests.append(own_nats.monitor("varz")["in_msgs"] - before)
    # An entry and a job are read for each letter; events and audit are known to be empty.
    assert requests[0] > 800
    assert requests[1] < 120


async def test_what_is_read_together_equals_single_reads(
    connection: NatsPyConnection, nats: NatsServer, name: str
) -> None:
    queue = await make_queue(connection, name, allow_direct=True, **QUEUE)
    await publish_jobs(connection, queue, ["first"])
    await publish_raw(nats, f"{name}.jobs.odd", b"Nats-Stream: mine\r\nNats-Sequence: 7\r\nA: 1\r\nA: 2", b"\0\xff")
    await publish_raw(nats, f"{name}.jobs.bare", b"", b"")
    await publish_jobs(connection, queue, ["last"] * 3)
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": 4, "no_erase": True})
    assert await stored_count(connection, name) == 5
    subjects = [f"{name}.jobs.{kind}" for kind in ("plain", "odd", "bare", "none", "plain")]
    by_batches = await find_exact_streams(connection, {name, "unknown"})
    assert by_batches.exact_streams == {name}
    for reader in (connection, by_batches):
        streams = Streams(reader)
        for sequences in ([], [1], [1, 2, 3, 4, 5, 6, 7], [2, 2**63]):
            single = {sequence: await get_message(connection, name, sequence) for sequence in sequences}
            assert await streams.get_many(name, sequences) == single
        last = await streams.last_many(name, subjects)
        assert {subject: message and message.sequence for subject, message in last.items()} == dict(
            zip(subjects, (6, 2, 3, None, 6), strict=True)
        )
        assert await streams.last_many(name, []) == {}
        for subject, start, stop in ((">", 1, None), (">", 2, 5), (f"{name}.jobs.plain", 1, 5), ("none", 1, None)):
            expected = [each async for each in read_range(connection, name, subject, start, stop)]
            assert [each async for each in read_range(reader, name, subject, start, stop)] == expected


@pytest.mark.parametrize("direct", ["allowed", "refused"])
async def test_a_stream_that_allows_no_direct_gets_any_more_is_still_read(
    connection: NatsPyConnection, name: str, direct: str
) -> None:
    queue = await make_queue(connection, name, allow_direct=True, **QUEUE)
    await publish_jobs(connection, queue, ["a", "b"])
    by_batches = await find_exact_streams(connection, {name})
    if direct == "refused":
        await change_stream(connection, name, allow_direct=False)
    streams = Streams(by_batches)
    assert [message and message.data for message in (await streams.get_many(name, [1, 2])).values()] == [b"a", b"b"]
    assert (await streams.last_many(name, [f"{name}.jobs.plain"]))[f"{name}.jobs.plain"]
    assert [message.sequence async for message in read_range(by_batches, name)] == [1, 2]
    await connection.api(f"STREAM.DELETE.{name}")
    for read in (streams.get_many(name, [1]), streams.last_many(name, ["a"])):
        with pytest.raises(NotFoundError):
            await read


# Reads which sequences a stream stores, and counts dead letters by them.


@pytest.mark.slow
async def test_stored_sequences_are_read_without_messages(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    stored = await stored_sequences(connection, name)
    assert (0 in stored, 1 in stored, stored.exact) == (False, False, True)
    await publish_jobs(connection, queue, "abcdefg")
    for sequence in (1, 2, 4, 7):
        await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": sequence, "no_erase": True})
    stored = await stored_sequences(connection, name)
    assert ([sequence for sequence in range(10) if sequence in stored], stored.exact) == ([3, 5, 6], True)
    monkeypatch.setattr(seams.STREAM_API_MAX_DELETED, 0)
    stored = await stored_sequences(connection, name)
    assert ([sequence for sequence in range(10) if sequence in stored], stored.exact) == ([3, 4, 5, 6, 7], False)


@pytest.mark.slow
@pytest.mark.parametrize("counted", ["by sequences", "one by one"])
@pytest.mark.parametrize("busy", [False, True])
async def test_letters_are_counted_equally_by_sequences_and_one_by_one(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, counted: str, *, busy: bool
) -> None:
    if counted == "one by one":

        async def inexact(
            connection: NatsPyConnection, stream: str, state: Mapping[str, Any] | None = None
        ) -> SequenceSet:
            stored = await stored_sequences(connection, stream, state)
            return SequenceSet(stored.first, stored.last, exact=False)

        monkeypatch.setattr(seams.RECONCILIATION_STORED_SEQUENCES, inexact)
    queue = await make_queue(connection, name, consumer={"ack_wait": "20s"}, dead="abcdefgh")
    # One was acknowledged late, one deleted, one has no entry; one more is in flight.
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": 3, "no_erase": True})
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": 8, "no_erase": True})
    await connection.api(f"STREAM.MSG.DELETE.{name}-dead", {"seq": 5, "no_erase": True})
    if busy:
        await publish_jobs(connection, queue, "i")
        await pull_jobs(connection, queue, 1)
    scan = await Scan.begin(connection, queue)
    assert (scan.reconciliation.inconsistent_consumers, scan.reconciliation.uncertain) == (set(), int(busy))
    assert list(scan.reconciliation.orphans) == ([] if busy else [5])
    letters = [letter.sequence async for letter in scan.letters(Selection())]
    assert letters == ([1, 2, 4, 6, 7] if busy else [1, 2, 4, 5, 6, 7])
