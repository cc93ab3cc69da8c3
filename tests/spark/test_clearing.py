"""Entries of redriven letters are purged together, and nothing else goes with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from bulk_letters import let_die, make_letters, messages_of, publish

from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES, copy_subject, parked_subject
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.spark.bulk_redrive import clearing
from airflow_provider_jetstream.spark.bulk_redrive.entry_cleanup import remove_finished_entries
from airflow_provider_jetstream.spark.connections import run_on_own_connection
from testbed.nats_server import NatsServer

if TYPE_CHECKING:
    from collections.abc import Collection

    from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

COUNT = 60


@pytest.fixture
def queue(where: dict[str, str], name: str) -> WorkQueue:
    return told_queue(where, name)


def told_queue(where: dict[str, str], name: str) -> WorkQueue:
    """Make a queue with a copy and an advisory of every other letter, and an advisory of the others."""
    queue = make_letters(where, name, COUNT)

    async def tell(connection: BlockingConnection) -> None:
        for sequence in range(2, COUNT + 1, 2):
            await store(connection, copy_subject(name, "worker", sequence), b"copied")

    run_on_own_connection(where, tell)
    return queue


def scanned(where: dict[str, str], queue: WorkQueue) -> Scan:
    async def scan(connection: BlockingConnection) -> Scan:
        await connection.discover_capabilities([])
        return await Scan.begin(connection, queue)

    return run_on_own_connection(where, scan)


def entries(where: dict[str, str], queue: WorkQueue) -> list[int]:
    return [each.sequence for each in messages_of(where, f"{queue.name}-dead")]


def of_others(scan: Scan, redriven: Collection[int]) -> list[int]:
    return sorted(each.sequence for sequence, told in scan.index.jobs() if sequence not in redriven for each in told)


@pytest.mark.parametrize(
    "redriven",
    [
        range(1, COUNT + 1),
        range(1, 20),
        range(20, COUNT + 1),
        {*range(1, COUNT + 1)} - {17},
        {*range(1, COUNT + 1)} - {18, 44},
        {3, 30, 59},
        (),
    ],
    ids=["all", "first", "last", "all but one", "all but two", "some", "none"],
)
def test_what_is_said_about_other_letters_stays(
    where: dict[str, str], queue: WorkQueue, redriven: Collection[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several purges of a few.
    monkeypatch.setattr(clearing, "_AT_A_TIME", 7)
    scan = scanned(where, queue)
    assert remove_finished_entries(where, scan, redriven) == 0
    assert entries(where, queue) == of_others(scan, redriven)


def test_deaths_that_were_told_later_stay(where: dict[str, str], queue: WorkQueue) -> None:
    scan = scanned(where, queue)
    run_on_own_connection(where, lambda connection: publish(connection, queue, 5))
    let_die(where, queue, 5)
    assert remove_finished_entries(where, scan, range(1, COUNT + 1)) == 0
    assert entries(where, queue) == [*range(COUNT + COUNT // 2 + 1, COUNT + COUNT // 2 + 6)]


def test_a_dead_letter_queue_that_was_made_anew_keeps_what_it_holds(where: dict[str, str], queue: WorkQueue) -> None:
    scan = scanned(where, queue)

    async def make_anew(connection: BlockingConnection) -> None:
        letters = f"{queue.name}-dead"
        config = (await connection.api(f"STREAM.INFO.{letters}"))["config"]
        await connection.api(f"STREAM.DELETE.{letters}")
        await connection.api(f"STREAM.CREATE.{letters}", config)
        await publish(connection, queue, 5)

    run_on_own_connection(where, make_anew)
    let_die(where, queue, 5)
    assert remove_finished_entries(where, scan, range(1, COUNT + 1)) == 0
    assert entries(where, queue) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", ["advisory", "copy", "parked"])
def test_entries_that_cant_be_read_or_are_parked_stay(where: dict[str, str], queue: WorkQueue, kind: str) -> None:
    subject = {
        "advisory": f"{MAX_DELIVERIES}.{queue.name}.worker",
        "copy": f"dead.{queue.name}.worker.none",
        "parked": parked_subject(queue.name, "worker", 1),
    }[kind]

    async def tell(connection: BlockingConnection) -> None:
        await store(connection, subject, b"no entry")

    run_on_own_connection(where, tell)
    let_stay = entries(where, queue)[-1]
    scan = scanned(where, queue)
    redriven = [*range(1, COUNT + 1)]
    assert remove_finished_entries(where, scan, redriven) == 0
    # A letter that was parked before it was redriven leaves its parking place too.
    assert entries(where, queue) == ([] if kind == "parked" else [let_stay])


@pytest.mark.parametrize("denied", ["deny_purge", "deny_delete"])
def test_a_dead_letter_queue_that_denies_purges_is_cleared_one_by_one(
    where: dict[str, str], queue: WorkQueue, denied: str
) -> None:
    letters = f"{queue.name}-dead"

    async def deny(connection: BlockingConnection) -> None:
        config = (await connection.api(f"STREAM.INFO.{letters}"))["config"]
        await connection.api(f"STREAM.UPDATE.{letters}", config | {denied: True})

    run_on_own_connection(where, deny)
    scan = scanned(where, queue)
    assert remove_finished_entries(where, scan, range(1, COUNT)) == 0
    assert entries(where, queue) == of_others(scan, range(1, COUNT))


_DENIED = """
authorization {{
  users: [
    {{user: all, password: all}}
    {{user: some, password: some, permissions: {{publish: {{deny: [{denied}]}}}}}}
  ]
}}
"""


@pytest.mark.parametrize(("denied", "left"), [(["PURGE"], 0), (["PURGE", "MSG"], COUNT + COUNT // 2)])
def test_who_may_not_purge_removes_one_by_one_and_who_may_nothing_leaves_them(
    name: str, denied: list[str], left: int, caplog: pytest.LogCaptureFixture
) -> None:
    names = ", ".join(f'"$JS.API.STREAM.{each}.>"' for each in denied)
    with NatsServer(config=_DENIED.format(denied=names)) as server:
        everything = {"servers": server.url, "user": "all", "password": "all"}
        queue = told_queue(everything, name)
        scan = scanned(everything, queue)
        some = {"servers": server.url, "user": "some", "password": "some", "timeout": "1"}
        assert remove_finished_entries(some, scan, range(1, COUNT + 1)) == left
        assert len(entries(everything, queue)) == left
    assert "one by one" in caplog.text
    assert ("stay until the next redrive" in caplog.text) == bool(left)
