"""Entries arrive in tasks as they are in the driver's index, in the order of the jobs."""

from __future__ import annotations

from array import array
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry, EntryKind
from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex
from airflow_provider_jetstream.spark.dead_letters.entry_table import (
    JOB_SCHEMA,
    index_from_batches,
    job_table,
)

LAST = 2**63 - 1


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


entries = st.builds(
    Entry,
    sequence=st.integers(1, LAST),
    kind=st.sampled_from(EntryKind),
    consumer=st.sampled_from([None, "till", "press", ""]),
    recorded_at=st.integers(0, 2**50).map(lambda microseconds: EPOCH + timedelta(microseconds=microseconds)),
    deliveries=st.integers(0, 2**32 - 1),
)


jobs = st.one_of(st.integers(1, 12), st.integers(1, 2**64 - 1))


@given(
    st.lists(st.tuples(jobs, entries), max_size=40),
    st.sets(st.integers(1, LAST)),
    st.none() | st.sets(st.integers(1, 12)),
    st.integers(1, 7),
)
def test_an_index_survives_the_conversion(
    indexed: list[tuple[int, Entry]], orphans: set[int], selected: set[int] | None, size: int
) -> None:
    index = EntryIndex()
    for job, entry in indexed:
        index.add(job, entry)
    orphans -= {job for job, _ in indexed}
    table = job_table(index, array("Q", sorted(orphans)), selected)
    assert table.schema == JOB_SCHEMA
    with_entry = {job for job, _ in indexed if job <= LAST and (selected is None or job in selected)}
    without_entry = sorted(job for job in orphans if selected is None or job in selected)
    assert table.column("sequence").to_pylist() == sorted({*with_entry, *without_entry})
    converted, converted_orphans = index_from_batches(table.to_batches(max_chunksize=size))
    assert list(converted.jobs()) == [job for job in index.jobs() if job[0] in with_entry]
    assert list(converted_orphans) == without_entry
