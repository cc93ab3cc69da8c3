"""Letters that are found by what was read at once are those that the classifier finds job by job.

Each test classifies all jobs over a connection that announces nothing, so that each job is read by itself, and over one
that reads them at once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream import Selection, connect, connection_settings, redrive_dead_letters
from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.client.streams import find_exact_streams
from airflow_provider_jetstream.jetstream.dead_letters.entry import EntryParser
from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex
from airflow_provider_jetstream.jetstream.dead_letters.facts import FactReader
from testbed import seams
from testbed.any_letters import (
    JOBS,
    ScannedQueue,
    any_context,
    any_entries,
)
from testbed.any_letters import make_queue as make_scanned_queue
from testbed.dead_letters import make_terminated_letters, request_for
from testbed.face import Scan
from testbed.queues import make_dead_letters, make_queue

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from airflow_provider_jetstream.jetstream import Connection, DeadLetter, WorkQueue
    from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry
    from airflow_provider_jetstream.jetstream.dead_letters.facts import ScanContext
    from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer


@pytest.fixture(scope="module")
def queue(nats: NatsServer) -> ScannedQueue:
    return asyncio.run(make_scanned_queue(nats, "byadvisory"))


async def classify(
    connection: Connection,
    context: ScanContext,
    entries: list[tuple[int, Entry]],
    orphans: Collection[int] = (),
    inconsistent: Collection[str] = (),
) -> list[DeadLetter | NotDead]:
    index = EntryIndex()
    for sequence, entry in entries:
        index.add(sequence, entry)
    reader = await context.reader(
        *(connection, index),
        archive=None,
        audit=AuditLog.from_snapshot(connection, context.queue, context.snapshot),
        inconsistent_consumers=inconsistent,
        orphans=orphans,
    )
    jobs = dict.fromkeys(orphans, ()) | dict(index.jobs())
    return await reader.classify(sorted(jobs.items()))


async def classify_twice(
    queue: ScannedQueue,
    context: ScanContext,
    entries: list[tuple[int, Entry]],
    orphans: Collection[int] = (),
    inconsistent: Collection[str] = (),
) -> tuple[list[DeadLetter | NotDead], list[DeadLetter | NotDead]]:
    """Classify jobs by what the streams' leaders answer, and by batches of direct gets."""
    streams = {context.snapshot.queue, *context.snapshot.companions}
    async with connect(connection_settings({"servers": (queue.options["servers"],), "timeout": 10})) as connection:
        at_once = await find_exact_streams(connection, streams)
        alone = await classify(connection, context, entries, orphans, inconsistent)
        return alone, await classify(at_once, context, entries, orphans, inconsistent)


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_both_agree_on_any_entries(queue: ScannedQueue, data: st.DataObject) -> None:
    entries, context = data.draw(any_entries(queue)), data.draw(any_context(queue))
    orphans = data.draw(st.sets(st.integers(1, JOBS + 3), max_size=5)) - {job for job, _ in entries}
    inconsistent = frozenset(data.draw(st.sets(st.sampled_from(["till", "press"]))))
    alone, at_once = asyncio.run(classify_twice(queue, context, entries, orphans, inconsistent))
    assert at_once == alone


# Pages of letters that are proved at the same time are each proved by what holds for it.


async def test_each_of_them_is_proved_again_after_the_connection_was_lost(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    sequences = await make_dead_letters(connection, queue, "abcdef")
    read, begun, lost = FactReader.classify, list[tuple[int, ...]](), asyncio.Event()

    async def classify(reader: FactReader, jobs: Sequence[tuple[int, Any]]) -> list[Any]:
        begun.append(tuple(sequence for sequence, _ in jobs))
        if len(begun) == 2:
            # Both pages are read from the server as it was before.
            connection.reconnects += 1
            lost.set()
        results = await read(reader, jobs)
        await lost.wait()
        return results

    monkeypatch.setattr(FactReader, "classify", classify)
    monkeypatch.setattr(seams.SCAN_PAGE, 2)
    scan = await Scan.begin(connection, queue)
    pages = [page async for page in scan.pages(Selection(), ahead=1)]
    assert [letter.sequence for page in pages for letter in page.letters] == sequences
    first, second, third = (tuple(sequences[start : start + 2]) for start in (0, 2, 4))
    assert sorted(begun) == [first, first, second, second, third]


# A scan that continues an earlier one knows the same entries as one that reads all of them.


async def continued(connection: NatsPyConnection, queue: WorkQueue, before: Scan) -> Scan:
    """Continue a scan, and compare what it knows with a scan that reads everything."""
    scan, fresh = await Scan.begin(connection, queue, since=before), await Scan.begin(connection, queue)
    assert list(scan.index.jobs()) == list(fresh.index.jobs())
    assert (scan.index.read_to, scan.uncertain) == (fresh.index.read_to, fresh.uncertain)
    assert [letter.sequence async for letter in scan.letters()] == [letter.sequence async for letter in fresh.letters()]
    return scan


async def test_new_entries_are_added_and_removed_ones_forgotten(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await make_terminated_letters(connection, queue, ["a", "b", "c"])
    first = await Scan.begin(connection, queue)
    again = await continued(connection, queue, first)
    assert again.index is first.index
    await make_terminated_letters(connection, queue, ["d", "e"])
    again = await continued(connection, queue, again)
    assert again.index is first.index
    await redrive_dead_letters(connection, queue, request_for([2, 4]))
    again = await continued(connection, queue, again)
    assert [letter.sequence async for letter in again.letters()] == [1, 3, 5]
    # Whoever empties the stream removes what was read, too.
    await connection.api(f"STREAM.PURGE.{name}-dead", {})
    again = await continued(connection, queue, again)
    await make_terminated_letters(connection, queue, ["f"])
    await continued(connection, queue, again)


async def test_another_stream_of_the_same_name_is_read_from_its_beginning(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await make_terminated_letters(connection, queue, ["a", "b"])
    before = await Scan.begin(connection, queue)
    for stream in (f"{name}-dead", name):
        await connection.api(f"STREAM.DELETE.{stream}", {})
    queue = await make_queue(connection, name)
    await make_terminated_letters(connection, queue, ["c", "d", "e"])
    again = await continued(connection, queue, before)
    assert again.index is not before.index


async def test_nothing_continues_what_was_cut_off(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await make_terminated_letters(connection, queue, ["a", "b"])
    before = await Scan.begin(connection, queue)
    await make_terminated_letters(connection, queue, ["c", "d"])
    # As a scan that a viewer's connection took away half way.
    parser = EntryParser(name, before.snapshot.created, connection.domain)
    assert [each async for each in before.index.read(connection, f"{name}-dead", parser, 3, 3)] == [(3, 3)]
    again = await continued(connection, queue, before)
    assert again.index is not before.index
