from __future__ import annotations

from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.errors import (
    JetStreamProviderError,
    QueueFullError,
)
from airflow_provider_jetstream.jetstream.publishing.report import (
    PublishFailure,
    PublishIncompleteError,
    PublishReport,
    index_runs,
    sequence_ranges,
)


def _report(*errors: JetStreamProviderError | None) -> PublishReport:
    failures = [
        PublishFailure(index, f"id-{index}", error, certain=True) for index, error in enumerate(errors) if error
    ]
    sequences = array("Q", (0 if error else index + 1 for index, error in enumerate(errors)))
    return PublishReport("q", sequences, failures=failures)


@given(st.lists(st.integers(min_value=0, max_value=40)))
def test_ranges_hold_exactly_the_sequences_in_the_fewest_ranges(sequences: list[int]) -> None:
    spans = sequence_ranges(sequences)
    assert [number for low, high in spans for number in range(low, high + 1)] == sorted(set(sequences) - {0})
    assert all(later[0] - earlier[1] > 1 for earlier, later in pairwise(spans))


# Runs and gaps, longer than what is compared at once: a start, how many jobs follow it, how many aren't stored.
_stretches = st.lists(
    st.tuples(st.integers(1, 5_000), st.one_of(st.integers(0, 3), st.integers(1_020, 2_060)), st.integers(0, 2)),
    max_size=4,
)


def _sequences(stretches: list[tuple[int, int, int]]) -> array[int]:
    sequences = array("Q")
    for start, count, gap in stretches:
        sequences.extend([*range(start, start + count), *[0] * gap])
    return sequences


@given(_stretches)
def test_runs_say_where_each_sequence_stands_in_the_fewest_runs(stretches: list[tuple[int, int, int]]) -> None:
    sequences = _sequences(stretches)
    runs = index_runs(sequences)
    found = {first + place: start + place for first, start, count in runs for place in range(count)}
    assert found == {index: sequence for index, sequence in enumerate(sequences) if sequence}
    assert all((second[0] - first[2], second[1] - first[2]) != first[:2] for first, second in pairwise(runs))


def test_ranges_of_awaited_jobs_leave_out_schedules() -> None:
    report = PublishReport("q", array("Q", [4, 5, 6, 0, 9]), scheduled={1}, extra=array("Q", [10, 2]))
    assert report.awaited_ranges() == [(2, 2), (4, 4), (6, 6), (9, 10)]
    report.scheduled.clear()
    assert report.awaited_ranges() == sequence_ranges(report.awaited()) == [(2, 2), (4, 6), (9, 10)]


def test_a_long_list_of_failures_is_shortened_in_the_message_but_not_in_the_report() -> None:
    with pytest.raises(PublishIncompleteError) as caught:
        _report(*[QueueFullError("full")] * 40).raise_for_failures()
    assert str(caught.value).endswith("job 4 (id id-4) is not stored: full; and 35 more")
    assert len(caught.value.report.failures) == 40
