"""The archive: finding a job's copy."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import provision
from testbed.face import ArchiveReader, stream_info
from testbed.queues import (
    eventually,
    make_queue,
    publish_jobs,
    stored_count,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection


SAMPLED = {"sample_freq": "100%"}


async def opened(connection: NatsPyConnection, queue: WorkQueue) -> ArchiveReader:
    created = datetime.fromisoformat((await stream_info(connection, queue.name))["created"])
    archive = await ArchiveReader.open(connection, queue, created)
    assert archive is not None
    return archive


async def archived(connection: NatsPyConnection, queue: WorkQueue, bodies: list[str]) -> list[int]:
    before = await stored_count(connection, f"{queue.name}-archive")
    sequences = await publish_jobs(connection, queue, bodies)
    await eventually(lambda: holds(connection, queue, before + len(bodies)))
    return sequences


async def holds(connection: NatsPyConnection, queue: WorkQueue, count: int) -> bool:
    return await stored_count(connection, f"{queue.name}-archive") == count


async def test_a_copy_is_found_at_the_first_guess_where_nothing_is_missing(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await archived(connection, queue, [str(number) for number in range(100)])
    archive = await opened(connection, queue)
    for sequence in (1, 57, 100, 2):
        before = connection.client.stats["out_msgs"]
        copy = await archive.find(sequence)
        assert copy is not None
        assert (copy.sequence, copy.data, copy.subject) == (
            sequence,
            str(sequence - 1).encode(),
            f"{name}.jobs.plain",
        )
        assert connection.client.stats["out_msgs"] - before == 1
    assert await archive.find(101) is None
    assert await archive.find(0) is None


@pytest.mark.slow
async def test_copies_behind_gaps_are_found(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await archived(connection, queue, [str(number) for number in range(60)])
    gone = {1, 2, 3, 10, *range(20, 40), 60}
    for sequence in gone:
        await connection.api(f"STREAM.MSG.DELETE.{name}-archive", {"seq": sequence})
    archive = await opened(connection, queue)
    for place in range(60):
        sequence = place * 37 % 60 + 1
        copy = await archive.find(sequence)
        assert (copy.data if copy else None) == (None if sequence in gone else str(sequence - 1).encode())


async def test_copies_after_gaps_in_the_numbers_are_found(connection: NatsPyConnection, name: str) -> None:
    # The archive missed some jobs, so that its numbers lag behind the queue's.
    queue = await make_queue(connection, name)
    await archived(connection, queue, ["1", "2", "3"])
    config = (await stream_info(connection, f"{name}-archive"))["config"]
    await connection.api(f"STREAM.UPDATE.{name}-archive", config | {"subjects": [f"{name}.elsewhere"]})
    await publish_jobs(connection, queue, ["4", "5"])
    await connection.api(f"STREAM.UPDATE.{name}-archive", config)
    await archived(connection, queue, ["6", "7", "8"])
    archive = await opened(connection, queue)
    copies = {sequence: await archive.find(sequence) for sequence in range(1, 10)}
    assert {sequence for sequence, copy in copies.items() if copy} == {1, 2, 3, 6, 7, 8}
    assert all(copy.data == str(sequence).encode() for sequence, copy in copies.items() if copy)


async def test_copies_of_an_earlier_stream_are_not_found(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await archived(connection, queue, ["old 1", "old 2", "old 3"])
    await connection.api(f"STREAM.DELETE.{name}")
    await provision(connection, queue)
    archive = await opened(connection, queue)
    assert [await archive.find(sequence) for sequence in (1, 2, 3)] == [None, None, None]
    await archived(connection, queue, ["new 1", "new 2"])
    archive = await opened(connection, queue)
    copies = [await archive.find(sequence) for sequence in (1, 2, 3)]
    assert [copy.data if copy else None for copy in copies] == [b"new 1", b"new 2", None]


async def test_copies_left_by_a_purge_are_found(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await archived(connection, queue, [str(number) for number in range(1, 31)])
    await connection.api(f"STREAM.PURGE.{name}-archive", {"seq": 21})
    archive = await opened(connection, queue)
    assert await archive.find(20) is None
    copy = await archive.find(25)
    assert copy is not None
    assert copy.data == b"25"
    await connection.api(f"STREAM.PURGE.{name}-archive")
    archive = await opened(connection, queue)
    assert await archive.find(25) is None


async def test_messages_that_are_no_copies_are_skipped(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    for number in range(1, 21):
        await connection.client.jetstream().publish(f"archive.{name}.stray", b"stray")
        await archived(connection, queue, [str(number)])
        await connection.client.jetstream().publish(f"archive.{name}.stray", b"stray")
    archive = await opened(connection, queue)
    for number in range(1, 21):
        copy = await archive.find(number)
        assert copy is not None
        assert copy.data == str(number).encode()


async def test_a_queue_without_an_archive_has_none(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, archive=False)
    assert await ArchiveReader.open(connection, queue, datetime.now(UTC)) is None
    declared = await make_queue(connection, f"{name}2")
    await connection.api(f"STREAM.DELETE.{name}2-archive")
    assert await ArchiveReader.open(connection, declared, datetime.now(UTC)) is None
