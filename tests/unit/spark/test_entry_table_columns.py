"""Entries arrive in tasks as they are in the driver's index, in the order of the jobs."""

from __future__ import annotations

from array import array
from datetime import UTC, datetime, timedelta

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry, EntryKind
from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex
from airflow_provider_jetstream.spark.dead_letters.entry_table import (
    JOB_SCHEMA,
    entries_from_columns,
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


@given(st.lists(st.tuples(jobs.filter(lambda job: job <= LAST), entries), max_size=40))
def test_entries_survive_the_conversion_and_null_means_no_entries(indexed: list[tuple[int, Entry]]) -> None:
    index = EntryIndex()
    for job, entry in indexed:
        index.add(job, entry)
    table = job_table(index, array("Q"))
    (batch, *others) = table.to_batches() or [None]
    assert not others
    if batch is not None:
        converted = entries_from_columns(batch.columns[1:])
        assert list(zip(batch.column(0).to_pylist(), converted, strict=True)) == list(index.jobs())
        nulls = [pa.nulls(2, field.type) for field in list(JOB_SCHEMA)[1:]]
        columns = [pa.concat_arrays([column, null]) for column, null in zip(batch.columns[1:], nulls, strict=True)]
        assert entries_from_columns(columns)[-2:] == [(), ()]
        assert entries_from_columns([column.slice(1) for column in columns])[:-2] == [
            job_entries for _, job_entries in list(index.jobs())[1:]
        ]
