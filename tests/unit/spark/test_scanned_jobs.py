"""A task gets the entries about its jobs as they are in the driver's index, in the order of the jobs."""

from __future__ import annotations

from array import array
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry, EntryKind
from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex
from airflow_provider_jetstream.spark.dead_letters.scanned_jobs import ScannedJobs, unpack_part

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
    st.integers(0, 200),
)
def test_the_parts_of_an_index_have_its_entries(
    indexed: list[tuple[int, Entry]], orphans: set[int], selected: set[int] | None, size: int, others: int
) -> None:
    index = EntryIndex()
    for job, entry in indexed:
        index.add(job, entry)
    # Among many others, each job is looked up by itself.
    for job in range(1_000, 1_000 + others):
        index.add(job, Entry(job, EntryKind.DELIVERIES, "press", EPOCH, 1))
    orphans -= {job for job, _ in index.jobs()}
    known = sorted({job for job, _ in indexed if job <= LAST} | orphans)
    scanned = ScannedJobs(array("Q", known), index, array("Q", sorted(orphans)))
    some = scanned if selected is None else scanned.among(selected)
    assert list(some.sequences) == [job for job in known if selected is None or job in selected]
    found, without_entry = list[tuple[int, tuple[Entry, ...]]](), list[int]()
    for start in range(0, len(some), size):
        part, bare = unpack_part(some.part(start, start + size))
        found += part.jobs()
        without_entry += bare
        assert {*part.deleted_in_flight()} == {*index.deleted_in_flight()} & {*some.sequences[start : start + size]}
    wanted = {*some.sequences}
    assert found == [job for job in index.jobs() if job[0] in wanted]
    assert without_entry == sorted(orphans & wanted)
