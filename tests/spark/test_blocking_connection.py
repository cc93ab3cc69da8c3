"""Reads over the blocking connection: batches return the same messages as single reads, with every kind of reader."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from airflow_provider_jetstream.jetstream import connect
from airflow_provider_jetstream.jetstream.client.blocking.connection import Request
from airflow_provider_jetstream.jetstream.client.concurrency import gather, map_concurrently
from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.client.streams import Streams, is_last_of_batch, read_range
from airflow_provider_jetstream.jetstream.errors import DeadlineError
from airflow_provider_jetstream.spark.connections import blocking_connection
from testbed.face import Headers

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream import Connection, ConnectionSettings
    from testbed.face import NatsPyConnection, StoredMessage
    from testbed.nats_server import NatsServer
    from testbed.spark_face import BlockingConnection

_Result = TypeVar("_Result")

COUNT = 700
HEADERS = Headers([("Kind", "Größe"), ("Kind", "b"), ("Status", "204 EOB"), ("Nats-Stream", "other"), ("Empty", "")])


@pytest.fixture
def blocking(nats: NatsServer) -> Iterator[BlockingConnection]:
    with blocking_connection({"servers": nats.url}) as connection:
        yield connection


async def run(blocking: BlockingConnection, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine outside of the test's event loop, as a task does."""
    return await asyncio.to_thread(blocking.run, coroutine)


async def make_stream(connection: BlockingConnection, name: str, **config: Any) -> None:
    declared = {"name": name, "subjects": [f"{name}.>"], "storage": "memory", **config}
    await connection.api(f"STREAM.CREATE.{name}", declared)

    async def store_number(number: int) -> None:
        body, headers = b"%d" % number if number % 3 else b"", HEADERS if number % 5 == 0 else None
        await store(connection, f"{name}.{number % 7}", body, headers)

    await map_concurrently(store_number, range(1, COUNT + 1))
    for sequence in (1, 2, *range(300, 560), COUNT):
        await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": sequence, "no_erase": True})
    await connection.discover_capabilities([name])


async def read_on_event_loop(settings: ConnectionSettings, name: str, subject: str = ">") -> list[StoredMessage]:
    async with connect(settings) as connection:
        return await read(connection, name, subject)


async def read(connection: Connection, name: str, subject: str = ">", *bounds: int) -> list[StoredMessage]:
    return [message async for message in read_range(connection, name, subject, *bounds)]


@pytest.mark.slow
@pytest.mark.parametrize("direct", [True, False])
async def test_every_reader_reads_the_same_range(
    blocking: BlockingConnection, settings: ConnectionSettings, name: str, *, direct: bool
) -> None:
    await run(blocking, make_stream(blocking, name, allow_direct=direct))
    assert set(blocking.exact_streams) == ({name} if direct else set())
    whole = await read_on_event_loop(settings, name)
    assert len(whole) == COUNT - 2 - 260 - 1
    assert await run(blocking, read(blocking, name)) == whole
    for subject in (f"{name}.3", f"{name}.*", f"{name}.none"):
        assert await run(blocking, read(blocking, name, subject)) == await read_on_event_loop(settings, name, subject)
    assert await run(blocking, read(blocking, name, ">", 250, 600)) == [
        message for message in whole if 250 <= message.sequence <= 600
    ]


@pytest.mark.slow
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("sequences", [range(200, 400), range(1, COUNT + 10, 17)])
async def test_messages_that_are_read_together_equal_the_stored_ones(
    blocking: BlockingConnection, settings: ConnectionSettings, name: str, sequences: range, *, direct: bool
) -> None:
    await run(blocking, make_stream(blocking, name, allow_direct=direct))
    whole = {message.sequence: message for message in await read_on_event_loop(settings, name)}
    streams, subjects = Streams(blocking), [f"{name}.{number}" for number in (3, 0, 99)]
    assert await run(blocking, streams.get_many(name, sequences)) == {each: whole.get(each) for each in sequences}
    last = await run(blocking, streams.last_many(name, subjects))
    assert [message and message.sequence for message in last.values()] == [696, 693, None]


@pytest.mark.slow
async def test_requests_without_an_answer_end_in_time(
    nats: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    async def answer_first(message: Msg) -> None:
        if message.data == b"0":
            await message.respond(b"here")

    await connection.client.subscribe(name, cb=answer_first)
    await connection.client.flush()
    with blocking_connection({"servers": nats.url, "timeout": "0.5"}) as blocking:
        for request in (
            Request([(name, b"0"), (name, b"1"), (name, b"2")]),
            Request([(name, b"0")], is_last=is_last_of_batch),
            Request([(name, b"1")]),
        ):

            async def send(request: Request = request) -> object:
                return await request

            with pytest.raises(DeadlineError, match=f"no answer on {name} within 0.5 s"):
                await run(blocking, send())

        async def send_two(payload: bytes) -> list[bytes]:
            return [body for _, body in await Request([(name, b"0"), (name, payload)])]

        async def both() -> list[object]:
            return await gather([send_two(b"1"), send_two(b"0")])

        late, answered = await run(blocking, both())
        assert isinstance(late, DeadlineError)
        assert answered == [b"here", b"here"]
