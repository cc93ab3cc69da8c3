"""Reads which sequences a stream stores, and counts dead letters by them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import Selection
from airflow_provider_jetstream.jetstream.client.stream_api import SequenceSet, stored_sequences
from testbed import seams
from testbed.face import Scan
from testbed.queues import make_dead_letters, make_queue, publish_jobs, pull_jobs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from testbed.face import NatsPyConnection


@pytest.mark.slow
async def test_stored_sequences_are_read_without_messages(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    stored = await stored_sequences(connection, name)
    assert (0 in stored, 1 in stored, stored.exact) == (False, False, True)
    await publish_jobs(connection, queue, "abcdefg")
    for sequence in (1, 2, 4, 7):
        await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": sequence, "no_erase": True})
    stored = await stored_sequences(connection, name)
    assert ([sequence for sequence in range(10) if sequence in stored], stored.exact) == ([3, 5, 6], True)
    monkeypatch.setattr(seams.STREAM_API_MAX_DELETED, 0)
    stored = await stored_sequences(connection, name)
    assert ([sequence for sequence in range(10) if sequence in stored], stored.exact) == ([3, 4, 5, 6, 7], False)


@pytest.mark.slow
@pytest.mark.parametrize("counted", ["by sequences", "one by one"])
@pytest.mark.parametrize("busy", [False, True])
async def test_letters_are_counted_equally_by_sequences_and_one_by_one(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, counted: str, *, busy: bool
) -> None:
    if counted == "one by one":

        async def inexact(
            connection: NatsPyConnection, stream: str, state: Mapping[str, Any] | None = None
        ) -> SequenceSet:
            stored = await stored_sequences(connection, stream, state)
            return SequenceSet(stored.first, stored.last, exact=False)

        monkeypatch.setattr(seams.RECONCILIATION_STORED_SEQUENCES, inexact)
    queue = await make_queue(connection, name, consumer={"ack_wait": "20s"})
    await make_dead_letters(connection, queue, "abcdefgh")
    # One was acknowledged late, one deleted, one has no entry; one more is in flight.
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": 3, "no_erase": True})
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": 8, "no_erase": True})
    await connection.api(f"STREAM.MSG.DELETE.{name}-dead", {"seq": 5, "no_erase": True})
    if busy:
        await publish_jobs(connection, queue, "i")
        await pull_jobs(connection, queue, 1)
    scan = await Scan.begin(connection, queue)
    assert (scan.reconciliation.inconsistent_consumers, scan.reconciliation.uncertain) == (set(), int(busy))
    assert list(scan.reconciliation.orphans) == ([] if busy else [5])
    letters = [letter.sequence async for letter in scan.letters(Selection())]
    assert letters == ([1, 2, 4, 6, 7] if busy else [1, 2, 4, 5, 6, 7])
