"""The index over a dead letter queue's entries: small, ordered, and safe against any content of an entry."""

from __future__ import annotations

from array import array
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.client.stream_api import SequenceSet
from airflow_provider_jetstream.jetstream.dead_letters import entry_index
from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry, EntryKind
from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex, EntryOrder

START = datetime(2026, 1, 1, tzinfo=UTC)

entries_of_any_kind = st.builds(
    Entry,
    sequence=st.integers(1, 2**64 - 1),
    kind=st.sampled_from(EntryKind),
    consumer=st.none() | st.text(max_size=5),
    recorded_at=st.datetimes(timezones=st.just(UTC)),
    deliveries=st.integers(0, 2**32 - 1),
)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 2**64 - 1) | st.integers(1, 5), entries_of_any_kind), max_size=30))
def test_all_entries_are_returned_in_the_order_of_the_jobs(entries: list[tuple[int, Entry]]) -> None:
    index = EntryIndex()
    for sequence, entry in entries:
        index.add(sequence, entry)
    expected: dict[int, list[Entry]] = {}
    for sequence, entry in entries:
        expected.setdefault(sequence, []).append(entry)
    assert [(sequence, list(said)) for sequence, said in index.jobs()] == sorted(expected.items())
    for sequence, said in expected.items():
        assert sequence in index
        assert list(index.entries_of(sequence)) == said
    assert len(index) == len(entries)


@pytest.mark.parametrize("step", [1, 3, 7])
def test_many_jobs_are_returned_with_the_entries_that_are_left(step: int) -> None:
    index, count = EntryIndex(), 200
    for number in range(1, count + 1):
        # Two entries a job, in another order than that of the jobs unless the step is one.
        job = (number * step) % count // 2 + 1
        index.add(job, Entry(number, EntryKind.DELIVERIES, f"worker-{number % 2}", START, number))
    index.drop_missing(SequenceSet(20, count, frozenset({64, 65, 66, 128, 129, 199})))
    found = list(index.jobs())
    assert [job for job, _ in found] == sorted({job for job, _ in found})
    assert {entry.sequence for _, entries in found for entry in entries} == index.entry_sequences()
    assert all(index.entries_of(job) == entries for job, entries in found)
    # What is added while somebody reads is found at its place.
    jobs = index.jobs()
    next(jobs)
    index.add(10_000, Entry(count + 1, EntryKind.DELIVERIES, None, START, 1))
    assert [job for job, _ in jobs][-1] == 10_000


@given(
    st.lists(st.integers(1, 9), max_size=60),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 9),
)
def test_entries_keep_their_order_however_far_each_is_from_its_place(
    jobs: list[int], near_end: int, runs: int, after: int
) -> None:
    sequences = array("Q")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry_index, "_NEAR_END", near_end)
        patch.setattr(entry_index, "_MOST_RUNS", runs)
        order = EntryOrder(sequences)
        for job in jobs:
            sequences.append(job)
            order.take_new()
    positions = sorted(range(len(jobs)), key=jobs.__getitem__)
    assert list(order.after(after)) == [position for position in positions if jobs[position] > after]
    assert order.of(after) == [position for position in positions if jobs[position] == after]
