"""The archive: finding a job's copy, and purging copies that aren't needed any more."""

from __future__ import annotations

import asyncio
import base64
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream.archive import ArchiveReader
from airflow_provider_jetstream.jetstream.client.stream_api import consumer_info, stream_info
from airflow_provider_jetstream.jetstream.dead_letters import preservation
from airflow_provider_jetstream.jetstream.dead_letters.find import find_dead_letters
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource
from airflow_provider_jetstream.jetstream.dead_letters.preservation import BodyPreserver
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from testbed.queues import (
    CONSUMER,
    eventually,
    make_dead_letters,
    make_queue,
    process_all,
    publish_jobs,
    pull_jobs,
    stored_count,
)

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


# The server reports each acknowledgement: without that, whether a job ended isn't known, and its copy stays.
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


async def keep_and_release(connection: NatsPyConnection, queue: WorkQueue, selection: Selection | None = None) -> int:
    chosen = selection or Selection(vanished=True)
    scan = await Scan.begin(connection, queue, vanished=chosen.vanished)
    keeper = BodyPreserver(connection, scan)
    async for page in scan.pages(chosen):
        await keeper.preserve(page.letters)
    return await keeper.release_archive()


@pytest.fixture
def _no_youth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preservation, "_MIN_COPY_AGE", timedelta())
    monkeypatch.setattr(preservation, "_ADVISORY_DELAY", timedelta(seconds=0.3))


async def test_young_copies_are_not_purged(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED)
    await archived(connection, queue, ["a", "b", "c"])
    await process_all(connection, queue)
    assert await keep_and_release(connection, queue) == 0
    assert await stored_count(connection, f"{name}-archive") == 3


@pytest.mark.usefixtures("_no_youth")
async def test_when_all_jobs_have_ended_only_the_last_copy_stays(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED)
    await archived(connection, queue, [str(number) for number in range(50)])
    await process_all(connection, queue)
    assert await keep_and_release(connection, queue) == 49
    archive = await opened(connection, queue)
    assert (await archive.find(50)) is not None
    assert await keep_and_release(connection, queue) == 0
    await archived(connection, queue, ["next"])
    archive = await opened(connection, queue)
    copy = await archive.find(51)
    assert copy is not None
    assert copy.data == b"next"


@pytest.mark.usefixtures("_no_youth")
async def test_copies_stay_from_the_first_job_that_has_not_ended(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED | {"ack_wait": "30s", "max_deliver": 3})
    await archived(connection, queue, [str(number) for number in range(10)])
    messages = await pull_jobs(connection, queue, 6)
    for message in (*messages[:3], *messages[4:]):
        await message.ack_sync()
    assert await keep_and_release(connection, queue) == 3
    await messages[3].ack_sync()
    assert await keep_and_release(connection, queue) == 3
    await process_all(connection, queue)
    assert await keep_and_release(connection, queue) == 3


@pytest.mark.usefixtures("_no_youth")
async def test_a_scan_of_some_letters_purges_nothing(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED)
    await make_dead_letters(connection, queue, "abc")
    some = Selection(sequences=frozenset({2, 3}))
    assert await keep_and_release(connection, queue, some) == 0
    # All are classified, and those that aren't selected get no copy.
    assert await keep_and_release(connection, queue, Selection(consumer="none")) == 0
    assert await keep_and_release(connection, queue) == 2


@pytest.mark.usefixtures("_no_youth")
async def test_entries_stored_after_the_scan_are_read_before_a_purge(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED | {"ack_wait": "30s"})
    await archived(connection, queue, ["a", "b", "c"])
    messages = await pull_jobs(connection, queue, 3)
    for message in (messages[0], messages[2]):
        await message.ack_sync()
    await connection.request(messages[1].reply, b"+TERM")
    await eventually(lambda: _has_entries(connection, queue))
    advisory = await connection.api(f"STREAM.MSG.GET.{name}-dead", {"seq": 1})
    await connection.api(f"STREAM.PURGE.{name}-dead")
    scan = await Scan.begin(connection, queue)
    async for _ in scan.pages(Selection()):
        pass
    releasing = asyncio.create_task(BodyPreserver(connection, scan).release_archive())
    await asyncio.sleep(0.05)
    message = advisory["message"]
    await connection.client.jetstream().publish(message["subject"], base64.b64decode(message["data"]))
    assert await releasing == 1
    archive = await opened(connection, queue)
    assert await archive.find(2) is not None


async def _has_entries(connection: NatsPyConnection, queue: WorkQueue) -> bool:
    return await stored_count(connection, f"{queue.name}-dead") == 1


class Happenings:
    """Random events in the life of a queue's jobs, the same ones for the same seed."""

    def __init__(self, connection: NatsPyConnection, queue: WorkQueue, seed: int) -> None:
        self._connection, self._queue = connection, queue
        self._seed, self._draws = seed, 0
        self._flying: dict[int, Msg] = {}
        self.done: set[int] = set()
        self.terminated: set[int] = set()

    def draw(self, below: int) -> int:
        self._draws += 1
        return int(sha256(f"{self._seed}:{self._draws}".encode()).hexdigest(), 16) % below

    async def happen(self) -> None:
        connection, name = self._connection, self._queue.name
        await archived(connection, self._queue, ["job"] * (1 + self.draw(8)))
        if pending := (await consumer_info(connection, name, CONSUMER))["num_pending"]:
            for message in await pull_jobs(connection, self._queue, 1 + self.draw(pending)):
                self._flying[message.metadata.sequence.stream] = message
        for sequence in sorted(self._flying):
            await self._end(sequence, self.draw(6))
        if self.terminated and self.draw(3) == 0:
            await self._lose_one()

    async def _end(self, sequence: int, how: int) -> None:
        match how:
            case 0 | 1:
                await self._flying.pop(sequence).ack_sync()
                self.done.add(sequence)
            case 2:
                await self._connection.request(self._flying.pop(sequence).reply, b"+TERM why")
                self.terminated.add(sequence)
            case 3 | 4:
                await self._flying.pop(sequence).nak()

    async def _lose_one(self) -> None:
        """Delete a dead letter as if the server had lost it."""
        letters = (await find_dead_letters(self._connection, self._queue)).letters
        stored = [letter.sequence for letter in letters if letter.source == BodySource.QUEUE]
        if stored:
            lost = stored[self.draw(len(stored))]
            await self._connection.api(f"STREAM.MSG.DELETE.{self._queue.name}", {"seq": lost})


@pytest.mark.usefixtures("_no_youth")
@pytest.mark.parametrize("seed", range(6))
async def test_whatever_happens_a_copy_that_is_needed_stays(connection: NatsPyConnection, name: str, seed: int) -> None:
    queue = await make_queue(
        connection, name, consumer=SAMPLED | {"ack_wait": "30s", "max_deliver": 2, "max_ack_pending": -1}
    )
    happenings, released, preserved = Happenings(connection, queue, seed), 0, set[int]()
    everything = Selection(vanished=True)
    for _ in range(8):
        await happenings.happen()
        released += await keep_and_release(connection, queue)
        scan = await Scan.begin(connection, queue, vanished=True)
        preserved = {letter.sequence async for letter in scan.letters(everything) if letter.preserved}
        last = int((await stream_info(connection, name))["state"]["last_seq"])
        archive = await opened(connection, queue)
        needed = set(range(1, last + 1)) - happenings.done - preserved
        assert {sequence for sequence in needed if await archive.find(sequence) is None} == set()
        assert happenings.terminated <= preserved
        assert not happenings.done & preserved
    print(f"{released} copies purged, {len(happenings.done)} jobs done, {len(preserved)} letters preserved")
