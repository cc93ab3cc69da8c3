"""A scan that continues an earlier one knows the same entries as one that reads all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream import redrive_dead_letters
from airflow_provider_jetstream.jetstream.dead_letters.entry_parser import EntryParser
from testbed.dead_letters import make_terminated_letters, request_for
from testbed.face import Scan
from testbed.queues import make_queue

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection


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
