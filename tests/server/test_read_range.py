"""Reads ranges of stored messages, and calls coroutine functions concurrently."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream.client.message_reader import read_range
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from testbed.queues import eventually, stored_count

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection


async def make_stream(connection: NatsPyConnection, name: str, subjects: list[str], body: bytes = b"") -> None:
    await connection.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.>"], "storage": "memory"})
    for number, subject in enumerate(subjects, 1):
        await connection.client.publish(f"{name}.{subject}", body or str(number).encode())

    async def is_stored() -> bool:
        return await stored_count(connection, name) == len(subjects)

    await eventually(is_stored)


async def read_sequences(
    connection: NatsPyConnection, name: str, subject: str = ">", start: int = 1, stop: int | None = None
) -> list[int]:
    return [message.sequence async for message in read_range(connection, name, subject, start, stop)]


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 34, 700])
async def test_a_whole_stream_is_read_in_order(connection: NatsPyConnection, name: str, count: int) -> None:
    await make_stream(connection, name, ["a"] * count)
    assert await read_sequences(connection, name) == list(range(1, count + 1))


async def test_a_range_is_read(connection: NatsPyConnection, name: str) -> None:
    await make_stream(connection, name, ["a"] * 100)
    assert await read_sequences(connection, name, start=40, stop=60) == list(range(40, 61))
    assert await read_sequences(connection, name, start=90) == list(range(90, 101))
    assert await read_sequences(connection, name, start=101) == []
    assert await read_sequences(connection, name, stop=0) == []
    assert await read_sequences(connection, name, start=99, stop=1_000) == [99, 100]


@pytest.mark.slow
async def test_other_subjects_and_deleted_messages_are_skipped(connection: NatsPyConnection, name: str) -> None:
    await make_stream(connection, name, ["a" if number % 7 == 0 else "b" for number in range(1, 501)])
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
    await make_stream(connection, name, ["a" if number % 500 == 0 else "b" for number in range(1, 5_001)])
    before = connection.client.stats["out_msgs"]
    assert await read_sequences(connection, name, f"{name}.a") == list(range(500, 5_001, 500))
    assert connection.client.stats["out_msgs"] - before < 100


@pytest.mark.slow
async def test_many_matching_messages_take_about_one_request_each(connection: NatsPyConnection, name: str) -> None:
    await make_stream(connection, name, ["a"] * 5_000)
    before = connection.client.stats["out_msgs"]
    assert len(await read_sequences(connection, name)) == 5_000
    assert connection.client.stats["out_msgs"] - before < 5_100


@pytest.mark.slow
async def test_large_messages_are_read_a_few_at_a_time(connection: NatsPyConnection, name: str) -> None:
    await make_stream(connection, name, ["a"] * 100, b"x" * 700_000)
    assert await read_sequences(connection, name) == list(range(1, 101))


async def test_messages_that_are_stored_during_a_read_are_not_read(connection: NatsPyConnection, name: str) -> None:
    await make_stream(connection, name, ["a"] * 50)
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
