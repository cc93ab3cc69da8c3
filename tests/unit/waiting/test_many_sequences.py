"""A set of very many sequences is a set, in little memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.publishing.report import sequence_ranges
from airflow_provider_jetstream.jetstream.waiting.report import ManySequences

_SEQUENCES = st.one_of(st.integers(1, 3_000), st.integers(1, 2**63))
_CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), _SEQUENCES, st.just(0)),
        st.tuples(st.just("discard"), _SEQUENCES, st.just(0)),
        st.tuples(st.just("add_range"), st.integers(1, 4_000), st.integers(0, 3_000)),
    )
)


@given(_CHANGES)
def test_it_holds_what_a_set_holds(changes: list[tuple[str, int, int]]) -> None:
    ours, expected = ManySequences(), set[int]()
    for change, first, more in changes:
        if change == "add_range":
            ours.add_range(first, first + more)
            expected.update(range(first, first + more + 1))
        else:
            getattr(ours, change)(first)
            getattr(expected, change)(first)
    assert list(ours) == sorted(expected)
    assert len(ours) == len(expected)
    assert list(ours.ranges()) == sequence_ranges(expected)
    for start in (1, 700, 1_024, 2_000):
        assert list(ours.from_(start)) == sorted(value for value in expected if value >= start)
    assert all(sequence in ours for sequence in expected)
    assert not any(first in ours for _, first, _ in changes if first not in expected)
