"""Gets over a wire: many messages for one request are the same as each by itself, by whatever way they come."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from airflow_provider_jetstream.jetstream.client.blocking.requests import Request, RequestBatch, RequestMany
from airflow_provider_jetstream.jetstream.client.concurrency import gather, map_concurrently
from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.connection import ReadPlan
from airflow_provider_jetstream.jetstream.client.headers import Headers
from airflow_provider_jetstream.jetstream.client.message_reader import get_message, last_message, read_range
from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.errors import DeadlineError, NotFoundError
from airflow_provider_jetstream.spark.connections import blocking_connection

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
    from testbed.nats_server import NatsServer

_Result = TypeVar("_Result")

COUNT = 700
HEADERS = Headers([("Kind", "Größe"), ("Kind", "b"), ("Status", "204 EOB"), ("Nats-Stream", "other"), ("Empty", "")])


@pytest.fixture
def over(nats: NatsServer) -> Iterator[BlockingConnection]:
    with blocking_connection({"servers": nats.url}) as connection:
        yield connection


async def run(over: BlockingConnection, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Apart from the test's event loop, as in a task."""
    return await asyncio.to_thread(over.run, coroutine)


async def make(connection: BlockingConnection, name: str, **config: Any) -> None:
    declared = {"name": name, "subjects": [f"{name}.>"], "storage": "memory", **config}
    await connection.api(f"STREAM.CREATE.{name}", declared)

    async def put(number: int) -> None:
        body, headers = b"%d" % number if number % 3 else b"", HEADERS if number % 5 == 0 else None
        await store(connection, f"{name}.{number % 7}", body, headers)

    await map_concurrently(put, range(1, COUNT + 1))
    for gone in (1, 2, *range(300, 560), COUNT):
        await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": gone, "no_erase": True})
    await connection.discover_capabilities([name])


async def one_by_one(settings: ConnectionSettings, name: str, subject: str = ">") -> list[StoredMessage]:
    async with connect(settings) as connection:
        return await read(connection, name, subject)


async def read(connection: Connection, name: str, subject: str = ">", *part: int) -> list[StoredMessage]:
    return [message async for message in read_range(connection, name, subject, *part)]


@pytest.mark.parametrize("direct", [True, False])
async def test_a_range_is_the_same_by_every_way(
    over: BlockingConnection, settings: ConnectionSettings, name: str, *, direct: bool
) -> None:
    await run(over, make(over, name, allow_direct=direct))
    assert set(over.batch_readers) == ({name} if direct else set())
    whole = await one_by_one(settings, name)
    assert len(whole) == COUNT - 2 - 260 - 1
    assert await run(over, read(over, name)) == whole
    for subject in (f"{name}.3", f"{name}.*", f"{name}.none"):
        assert await run(over, read(over, name, subject)) == await one_by_one(settings, name, subject)
    assert await run(over, read(over, name, ">", 250, 600)) == [each for each in whole if 250 <= each.sequence <= 600]


async def test_an_answer_that_is_cut_for_its_size_is_gone_on_with(
    over: BlockingConnection, settings: ConnectionSettings, name: str
) -> None:
    async def make_large() -> None:
        await over.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.>"], "allow_direct": True})
        for number in range(12):
            await store(over, f"{name}.{number}", bytes([number]) * 900_000)
        await over.discover_capabilities([name])

    await run(over, make_large())
    whole = await one_by_one(settings, name)
    assert [len(each.data) for each in await run(over, read(over, name))] == [900_000] * 12
    assert await run(over, read(over, name)) == whole

    async def foreseen() -> list[StoredMessage | None]:
        subjects = [f"{name}.{number}" for number in range(12)]
        async with over.prefetch([ReadPlan(name, range(1, 13), subjects)]):
            by_sequence = [await get_message(over, name, number) for number in range(1, 13)]
            assert [await last_message(over, name, each) for each in subjects] == by_sequence
            return by_sequence

    assert await run(over, foreseen()) == whole


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("sequences", [range(200, 400), range(1, COUNT + 10, 17)])
async def test_what_was_foreseen_is_what_is_there_and_is_forgotten(
    over: BlockingConnection, settings: ConnectionSettings, name: str, sequences: range, *, direct: bool
) -> None:
    await run(over, make(over, name, allow_direct=direct))
    whole = {each.sequence: each for each in await one_by_one(settings, name)}
    subjects = [f"{name}.{number}" for number in (3, 0, 99)]

    async def foreseen() -> None:
        async with over.prefetch([ReadPlan(name, sequences, subjects), ReadPlan(f"{name}-unknown", [1])]):
            await over.api(f"STREAM.MSG.DELETE.{name}", {"seq": sequences[10], "no_erase": True})
            found = [await get_message(over, name, each) for each in sequences]
            assert found == [whole.get(each) for each in sequences]
            last = [await last_message(over, name, each) for each in subjects]
            assert [each and each.sequence for each in last] == [696, 693, None]
        # Only what was asked for in the meantime was known in advance.
        assert await get_message(over, name, sequences[10]) is None

    await run(over, foreseen())


async def test_a_stream_that_does_not_exist_is_told(over: BlockingConnection, name: str) -> None:
    await run(over, over.discover_capabilities([name]))
    with pytest.raises(NotFoundError, match=f"expected stream {name}"):
        await run(over, get_message(over, name, 1))


async def test_an_answer_of_another_form_is_read_as_json(over: BlockingConnection, name: str) -> None:
    await run(over, make(over, name, allow_direct=False))
    subject = f'{name}.a"b\\c'

    async def put() -> StoredMessage | None:
        body = json.dumps({"not": "plain"}).encode()
        stored = await store(over, subject, body)
        return await get_message(over, name, stored.sequence)

    message = await run(over, put())
    assert message
    assert (message.subject, json.loads(message.data)) == (subject, {"not": "plain"})


async def test_answers_that_do_not_come_are_given_up_in_time(
    nats: NatsServer, connection: Connection, name: str
) -> None:
    async def first_only(message: Msg) -> None:
        if message.data == b"0":
            await message.respond(b"here")

    await connection.client.subscribe(name, cb=first_only)
    await connection.client.flush()
    with blocking_connection({"servers": nats.url, "timeout": "0.5"}) as over:
        for asked in (
            RequestMany([(name, b"0"), (name, b"1"), (name, b"2")]),
            RequestBatch(name, b"0"),
            Request(name, b"1"),
        ):

            async def ask(what: RequestMany | RequestBatch | Request = asked) -> object:
                return await what

            with pytest.raises(DeadlineError, match=f"no answer on {name} within 0.5 s"):
                await run(over, ask())

        async def both() -> list[object]:
            return await gather([ask_each(b"1"), ask_each(b"0")])

        async def ask_each(payload: bytes) -> list[bytes]:
            return [body for _, body in await RequestMany([(name, b"0"), (name, payload)])]

        late, come = await run(over, both())
        assert isinstance(late, DeadlineError)
        assert come == [b"here", b"here"]
