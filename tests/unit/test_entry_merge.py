"""Entries about one job, merged: a single advisory takes a short way, and ends where the long one does."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry, EntryKind
from airflow_provider_jetstream.jetstream.dead_letters.entry_merge import merge_entries
from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot

_NOW = datetime(2026, 11, 26, tzinfo=UTC)
_SNAPSHOT = QueueSnapshot("orders", "2026-11-01T00:00:00Z", {}, {}, {}, _NOW)


def _merged(entries: list[Entry], sequence: int) -> Any:
    # An advisory about used-up deliveries has no copy to be read.
    nothing_is_read = cast("Any", None)
    return asyncio.run(merge_entries(nothing_is_read, "orders-dead", _SNAPSHOT, sequence, entries))


@given(
    consumer=st.none() | st.text(max_size=5),
    seconds=st.integers(-(10**9), 10**9),
    deliveries=st.integers(0, 2**32 - 1),
    sequence=st.integers(1, 2**62),
)
def test_one_advisory_says_what_two_that_are_alike_say(
    consumer: str | None, seconds: int, deliveries: int, sequence: int
) -> None:
    entry = Entry(7, EntryKind.DELIVERIES, consumer, _NOW + timedelta(seconds=seconds), deliveries)
    assert _merged([entry], sequence) == _merged([entry, entry], sequence)
