"""What is said about jobs arrives in tasks as it was."""

from __future__ import annotations

from array import array
from datetime import UTC, datetime, timedelta

import pyarrow as pa
from hypothesis import given, settings
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

mentions = st.builds(
    Entry,
    entry=st.integers(1, LAST),
    kind=st.sampled_from(EntryKind),
    consumer=st.sampled_from([None, "till", "press", ""]),
    told_at=st.integers(0, 2**50).map(lambda each: EPOCH + timedelta(microseconds=each)),
    deliveries=st.integers(0, 2**32 - 1),
)
sequences = st.one_of(st.integers(1, 12), st.integers(1, 2**64 - 1))


@settings(deadline=None)
@given(
    st.lists(st.tuples(sequences, mentions), max_size=40),
    st.sets(st.integers(1, LAST)),
    st.none() | st.sets(st.integers(1, 12)),
    st.integers(1, 7),
)
def test_an_index_arrives_as_it_was(
    told: list[tuple[int, Entry]], others: set[int], wanted: set[int] | None, size: int
) -> None:
    index = EntryIndex()
    for sequence, mention in told:
        index.add(sequence, mention)
    others -= {sequence for sequence, _ in told}
    table = job_table(index, array("Q", sorted(others)), wanted)
    assert table.schema == JOB_SCHEMA
    meant = [sequence for sequence, _ in told if sequence <= LAST and (wanted is None or sequence in wanted)]
    left = sorted(each for each in others if wanted is None or each in wanted)
    assert table.column("sequence").to_pylist() == sorted({*meant, *left})
    found, untold = index_from_batches(table.to_batches(max_chunksize=size))
    assert list(found.jobs()) == [job for job in index.jobs() if job[0] in set(meant)]
    assert list(untold) == left


@given(st.lists(st.tuples(sequences.filter(lambda each: each <= LAST), mentions), max_size=40))
@settings(deadline=None)
def test_rows_beside_others_say_the_same_and_null_says_nothing(told: list[tuple[int, Entry]]) -> None:
    index = EntryIndex()
    for sequence, mention in told:
        index.add(sequence, mention)
    table = job_table(index, array("Q"))
    (batch, *others) = table.to_batches() or [None]
    assert not others
    if batch is not None:
        assert list(zip(batch.column(0).to_pylist(), entries_from_columns(batch.columns[1:]), strict=True)) == list(
            index.jobs()
        )
        absent = [pa.nulls(2, field.type) for field in list(JOB_SCHEMA)[1:]]
        joined = [pa.concat_arrays([column, none]) for column, none in zip(batch.columns[1:], absent, strict=True)]
        assert entries_from_columns(joined)[-2:] == [(), ()]
        assert entries_from_columns([each.slice(1) for each in joined])[:-2] == [
            said for _, said in list(index.jobs())[1:]
        ]
