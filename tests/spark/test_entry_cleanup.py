"""The entries of redriven letters are purged together, and no other entry is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from bulk_letters import exhaust_deliveries, make_letters, publish, stored_messages

from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES, copy_subject, parked_subject
from airflow_provider_jetstream.spark.bulk_redrive.entry_cleanup import remove_finished_entries
from testbed import seams
from testbed.face import Scan
from testbed.nats_server import NatsServer
from testbed.spark_face import run_on_own_connection

if TYPE_CHECKING:
    from collections.abc import Collection

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.spark_face import BlockingConnection

COUNT = 60


@pytest.fixture
def queue(connection_options: dict[str, str], name: str) -> WorkQueue:
    return queue_with_copies(connection_options, name)


def queue_with_copies(connection_options: dict[str, str], name: str) -> WorkQueue:
    """Make a queue whose letters have an advisory each, and every other one a copy too."""
    queue = make_letters(connection_options, name, COUNT)

    async def store_copies(connection: BlockingConnection) -> None:
        for sequence in range(2, COUNT + 1, 2):
            await store(connection, copy_subject(name, "worker", sequence), b"copied", {"Dead-Letter-Version": "1"})

    run_on_own_connection(connection_options, store_copies)
    return queue


def scan_queue(connection_options: dict[str, str], queue: WorkQueue) -> Scan:
    async def scan(connection: BlockingConnection) -> Scan:
        await connection.discover_capabilities([])
        return await Scan.begin(connection, queue)

    return run_on_own_connection(connection_options, scan)


def stored_entries(connection_options: dict[str, str], queue: WorkQueue) -> list[int]:
    return [message.sequence for message in stored_messages(connection_options, f"{queue.name}-dead")]


def other_entries(scan: Scan, redriven: Collection[int]) -> list[int]:
    return sorted(
        entry.sequence for sequence, entries in scan.index.jobs() if sequence not in redriven for entry in entries
    )


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
def test_entries_of_other_letters_stay(
    connection_options: dict[str, str], queue: WorkQueue, redriven: Collection[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that several purges are needed.
    monkeypatch.setattr(seams.ENTRY_CLEANUP_ENTRIES_PER_PURGE, 7)
    scan = scan_queue(connection_options, queue)
    assert remove_finished_entries(connection_options, scan, redriven) == 0
    assert stored_entries(connection_options, queue) == other_entries(scan, redriven)


def test_a_recreated_dead_letter_queue_keeps_its_entries(connection_options: dict[str, str], queue: WorkQueue) -> None:
    scan = scan_queue(connection_options, queue)

    async def recreate(connection: BlockingConnection) -> None:
        letters = f"{queue.name}-dead"
        config = (await connection.api(f"STREAM.INFO.{letters}"))["config"]
        await connection.api(f"STREAM.DELETE.{letters}")
        await connection.api(f"STREAM.CREATE.{letters}", config)
        await publish(connection, queue, 5)

    run_on_own_connection(connection_options, recreate)
    exhaust_deliveries(connection_options, queue, 5)
    assert remove_finished_entries(connection_options, scan, range(1, COUNT + 1)) == 0
    assert stored_entries(connection_options, queue) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", ["advisory", "copy", "parked"])
def test_unreadable_entries_stay_and_parked_ones_go(
    connection_options: dict[str, str], queue: WorkQueue, kind: str
) -> None:
    subject = {
        "advisory": f"{MAX_DELIVERIES}.{queue.name}.worker",
        "copy": f"dead.{queue.name}.worker.none",
        "parked": parked_subject(queue.name, "worker", 1),
    }[kind]

    async def store_entry(connection: BlockingConnection) -> None:
        await store(connection, subject, b"no entry", {"Dead-Letter-Version": "1"})

    run_on_own_connection(connection_options, store_entry)
    unreadable = stored_entries(connection_options, queue)[-1]
    scan = scan_queue(connection_options, queue)
    redriven = [*range(1, COUNT + 1)]
    assert remove_finished_entries(connection_options, scan, redriven) == 0
    # The parked copy of a letter that was redriven since is removed.
    assert stored_entries(connection_options, queue) == ([] if kind == "parked" else [unreadable])


_DENIED = """
authorization {{
  users: [
    {{user: all, password: all}}
    {{user: some, password: some, permissions: {{publish: {{deny: [{denied}]}}}}}}
  ]
}}
"""


@pytest.mark.parametrize(("denied", "left"), [(["PURGE"], 0), (["PURGE", "MSG"], COUNT + COUNT // 2)])
def test_entries_are_removed_one_by_one_or_stay_without_permissions(
    name: str, denied: list[str], left: int, caplog: pytest.LogCaptureFixture
) -> None:
    names = ", ".join(f'"$JS.API.STREAM.{name}.>"' for name in denied)
    with NatsServer(config=_DENIED.format(denied=names)) as server:
        everything = {"servers": server.url, "user": "all", "password": "all"}
        queue = queue_with_copies(everything, name)
        scan = scan_queue(everything, queue)
        some = {"servers": server.url, "user": "some", "password": "some", "timeout": "1"}
        assert remove_finished_entries(some, scan, range(1, COUNT + 1)) == left
        assert len(stored_entries(everything, queue)) == left
    assert "one by one" in caplog.text
    assert ("stay until the next redrive" in caplog.text) == bool(left)
