"""Looks at dead letters read what has changed, and count exactly what a scan of the whole queue counts."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import RedriveRequest, Selection, find_dead_letters, redrive_dead_letters
from airflow_provider_jetstream.jetstream.dead_letters.entry import EntryParser
from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex
from airflow_provider_jetstream.jetstream.dead_letters.preservation import StoredCopies
from airflow_provider_jetstream.jetstream.dead_letters.tracked_letters import TrackedLetters
from testbed.dead_letters import (
    acknowledge_jobs,
    change_stream,
    make_terminated_letters,
    publish_raw,
    request_for,
)
from testbed.face import stream_info, summarise_dead_letters
from testbed.queues import CONSUMER, eventually, make_dead_letters, make_queue, probe, publish_jobs, pull_jobs

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import WorkQueue
    from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry
    from airflow_provider_jetstream.jetstream.dead_letters.find import Summary
    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField
    from testbed.face import NatsPyConnection, StoredMessage
    from testbed.nats_server import NatsServer


def counted(summary: Summary, *, with_times: bool) -> dict[str, Any]:
    """Return what a summary counts."""
    names = ("dead", "ranges", "uncertain", "undeliverable", "dismissed")
    groups = {key: (group.count, group.example) for key, group in summary.groups.items()}
    times = {key: (group.first, group.last) for key, group in summary.groups.items()} if with_times else {}
    return {name: getattr(summary, name) for name in names} | {"groups": groups, "times": times}


async def same_as_scan(
    connection: NatsPyConnection, queue: WorkQueue, letters: TrackedLetters, *, with_times: bool = True
) -> Summary:
    """Look, and compare all counts with those of a scan of the whole queue.

    :param with_times: whether it is known when letters died; else a scan says a later time each time
    """
    cases: list[tuple[Selection, tuple[GroupField, ...]]] = [
        *((Selection(), ()), (Selection(parked=True), ()), (Selection(), ("reason",)))
    ]
    for selection, group_by in cases:
        assert await letters.refresh(connection)
        looked = await letters.summary(selection, group_by)
        scanned = await summarise_dead_letters(connection, queue, selection, group_by)
        if selection.parked:
            # A scan of parked letters doesn't read the others.
            assert (looked.dead, looked.ranges) == (scanned.dead, scanned.ranges)
        else:
            found, expected = counted(looked, with_times=with_times), counted(scanned, with_times=with_times)
            assert found == expected, f"{found} isn't {expected}"
    return await letters.summary(Selection(), ())


@pytest.mark.slow
async def test_looks_count_what_a_scan_counts_whatever_happens_to_letters(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, dead=["a", "b", "c"])
    letters = await TrackedLetters.prove(connection, queue)
    assert (await same_as_scan(connection, queue, letters)).dead == 3
    # New ones, by used-up deliveries and by termination.
    await make_dead_letters(connection, queue, ["d"])
    assert (await same_as_scan(connection, queue, letters)).ranges == [(1, 4)]
    (terminated,) = await make_terminated_letters(connection, queue, ["e"])
    assert (await same_as_scan(connection, queue, letters)).dead == 5
    # Redriven, parked, removed by hand, acknowledged by a worker after its death.
    await redrive_dead_letters(connection, queue, request_for([2]))
    summary = await same_as_scan(connection, queue, letters)
    assert summary.dead == 4
    assert await acknowledge_jobs(connection, queue, 1)
    await redrive_dead_letters(connection, queue, RedriveRequest(Selection(sequences=frozenset({1})), max_redrives=0))
    await same_as_scan(connection, queue, letters)
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": 3, "no_erase": True})
    summary = await same_as_scan(connection, queue, letters)
    assert 3 not in {first for first, _ in summary.ranges}
    assert terminated in {last for _, last in summary.ranges}


async def die_silently(connection: NatsPyConnection, queue: WorkQueue, body: str) -> None:
    """Let a job use up its deliveries while no entry of it is stored."""
    await publish_jobs(connection, queue, [body])

    async def is_dead() -> bool:
        with suppress(TimeoutError):
            for job in await pull_jobs(connection, queue, 1, within=0.5):
                await job.nak()
        await probe(connection, queue)
        info = await connection.api(f"CONSUMER.INFO.{queue.name}.{CONSUMER}")
        return not info["num_ack_pending"] and not info["num_pending"]

    await eventually(is_dead)


@pytest.mark.slow
async def test_a_death_without_an_entry_is_found_by_a_look(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead=["a"])
    letters = await TrackedLetters.prove(connection, queue)
    # The dead letter queue captures nothing for a while.
    config = await change_stream(connection, f"{name}-dead", subjects=[f"nothing.{name}"])
    await die_silently(connection, queue, "b")
    # Its configuration has changed, so that a look can't tell: what was removed meanwhile isn't known.
    assert not await letters.refresh(connection)
    letters = await TrackedLetters.prove(connection, queue)
    assert (await letters.summary(Selection(), ())).dead == 2
    await die_silently(connection, queue, "c")
    assert (await same_as_scan(connection, queue, letters, with_times=False)).ranges == [(1, 3)]
    await change_stream(connection, f"{name}-dead", subjects=config["subjects"])


@pytest.mark.slow
async def test_jobs_that_are_done_or_in_flight_are_no_letters(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"}, dead=["a"])
    letters = await TrackedLetters.prove(connection, queue)
    await publish_jobs(connection, queue, [str(number) for number in range(20)])
    await acknowledge_jobs(connection, queue, 15)
    assert (await same_as_scan(connection, queue, letters)).dead == 1
    open_jobs = await pull_jobs(connection, queue, 5)
    assert (await same_as_scan(connection, queue, letters)).dead == 1
    for job in open_jobs:
        await job.ack_sync()
    assert (await same_as_scan(connection, queue, letters)).dead == 1


async def test_after_a_gap_a_look_says_that_it_cannot_tell(
    connection: NatsPyConnection, nats: NatsServer, name: str
) -> None:
    queue = await make_queue(connection, name, dead=["a"])
    letters = await TrackedLetters.prove(connection, queue)
    # The queue is made anew, with the same sequences.
    await connection.api(f"STREAM.DELETE.{name}")
    await make_queue(connection, name)
    assert not await letters.refresh(connection)
    letters = await TrackedLetters.prove(connection, queue)
    assert (await letters.summary(Selection(), ())).dead == 0
    # The dead letter queue is made anew.
    await make_dead_letters(connection, queue, ["b"])
    assert (await same_as_scan(connection, queue, letters)).dead == 1
    await connection.api(f"STREAM.DELETE.{name}-dead")
    await make_queue(connection, name)
    assert not await letters.refresh(connection)


@pytest.mark.slow
async def test_entries_that_are_no_records_are_counted_as_unreadable_once(
    connection: NatsPyConnection, nats: NatsServer, name: str
) -> None:
    queue = await make_queue(connection, name, dead=["a"])
    letters = await TrackedLetters.prove(connection, queue)
    await publish_raw(nats, f"dead.{name}.worker.\udcff", b"X: \xff", b"no record")
    await publish_raw(nats, f"dead.{name}.worker.2", b"X: 1", b"no record either")

    async def stored() -> bool:
        info = await connection.api(f"STREAM.INFO.{name}-dead")
        return bool(info["state"]["last_seq"] >= 4)

    await eventually(stored)
    summary = await same_as_scan(connection, queue, letters)
    assert summary.dead == 1
    risks = {str(risk) for risk in summary.risks}
    assert risks == {str(risk) for risk in (await summarise_dead_letters(connection, queue)).risks}


@pytest.mark.slow
@pytest.mark.parametrize("letters_before", [5, 700])
async def test_a_look_reads_what_is_new_however_many_letters_there_are(
    connection: NatsPyConnection, nats: NatsServer, name: str, letters_before: int
) -> None:
    queue = await make_queue(connection, name, allow_direct=True, dead=["x"] * letters_before)
    letters = await TrackedLetters.prove(connection, queue)
    assert await letters.refresh(connection)
    received = nats.monitor("varz")["in_msgs"]
    assert await letters.refresh(connection)
    assert nats.monitor("varz")["in_msgs"] - received <= 5
    await make_dead_letters(connection, queue, ["y"] * 5)
    received = nats.monitor("varz")["in_msgs"]
    assert await letters.refresh(connection)
    assert nats.monitor("varz")["in_msgs"] - received <= 20
    assert (await letters.summary(Selection(), ())).ranges == [(1, letters_before + 5)]


@pytest.mark.slow
async def test_a_look_does_not_read_the_copies_that_an_earlier_one_has_stored(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, dead=["x"] * 300)
    letters = await TrackedLetters.prove(connection, queue)
    parsed: list[int] = []
    parse = EntryParser.parse

    def counted(self: EntryParser, message: StoredMessage) -> tuple[int, Entry] | None:
        parsed.append(message.sequence)
        return parse(self, message)

    monkeypatch.setattr(EntryParser, "parse", counted)
    await make_dead_letters(connection, queue, ["y"] * 2)
    assert await letters.refresh(connection)
    # The two new advisories, and a few copies where that is as fast as not reading them.
    assert len(parsed) < 30
    monkeypatch.undo()
    assert (await same_as_scan(connection, queue, letters)).dead == 302


async def test_copies_that_the_server_has_lost_and_replaced_are_read(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead=["x"] * 40)
    found = (await find_dead_letters(connection, queue)).letters
    await summarise_dead_letters(connection, queue)
    # Forty advisories, then forty copies in the order of the jobs; these are taken for copies of other jobs.
    stream, copies = f"{name}-dead", StoredCopies()
    for sequence, letter in zip(range(41, 81), reversed(found), strict=True):
        copies.add(sequence, letter)
    created = (await stream_info(connection, name))["created"]
    index, parser = EntryIndex(), EntryParser(name, created, connection.domain)
    reading = copies.read_with(connection, index, stream, parser, 1, 80)
    read = [(entry.sequence, entry.job) async for entry in reading]
    assert read == [(entry, (entry - 1) % 40 + 1) for entry in range(1, 81)]
    assert (index.read_to, [len(entries) for _, entries in index.jobs()]) == (80, [2] * 40)


@pytest.mark.slow
async def test_an_entry_about_a_job_that_cannot_be_does_not_stop_the_ledger(
    connection: NatsPyConnection, nats: NatsServer, name: str
) -> None:
    queue = await make_queue(connection, name, archive=f"{name}-archive", dead=["a"])
    await publish_jobs(connection, queue, ["b"])
    await acknowledge_jobs(connection, queue, 1)
    before = (await stream_info(connection, f"{name}-dead"))["state"]["messages"]
    # By a publisher with nothing but the right to copy dead letters.
    await publish_raw(nats, f"dead.{name}.worker.{2**64 - 1}", b"Dead-Letter-Version: 1", b"x")
    await publish_raw(nats, f"parked.{name}.worker.{2**64 - 1}", b"Dead-Letter-Version: 1", b"x")

    async def stored() -> bool:
        return bool((await stream_info(connection, f"{name}-dead"))["state"]["messages"] > before)

    await eventually(stored)
    letters = await TrackedLetters.prove(connection, queue)
    assert (await letters.summary(Selection(), ())).dead == 1
    await same_as_scan(connection, queue, letters)
