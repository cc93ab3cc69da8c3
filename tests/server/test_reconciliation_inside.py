"""What no face shows of reconciliation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream.dead_letters.entry_index import read_index
from airflow_provider_jetstream.jetstream.dead_letters.reconciliation import reconcile
from airflow_provider_jetstream.jetstream.queue.snapshot import take_snapshot
from testbed.queues import (
    eventually,
    make_queue,
    probe,
    pull_jobs,
    stored_count,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection


@pytest.mark.slow
async def test_a_death_after_the_count_makes_no_consumer_inconsistent(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"}, jobs="abc")
    dead, dying, _ = await pull_jobs(connection, queue, 3)
    await dead.nak()
    await eventually(lambda: _has_entries(connection, queue, 1))
    snapshot = await take_snapshot(connection, queue)
    await dying.nak()
    await eventually(lambda: _has_entries(connection, queue, 2))
    index = await read_index(connection, f"{name}-dead", name, snapshot.created)
    reconciliation = await reconcile(connection, snapshot, index, None)
    assert (reconciliation.inconsistent_consumers, reconciliation.uncertain, list(reconciliation.orphans)) == (
        set(),
        0,
        [],
    )


async def _has_entries(connection: NatsPyConnection, queue: WorkQueue, count: int) -> bool:
    await probe(connection, queue)
    return await stored_count(connection, f"{queue.name}-dead") == count
