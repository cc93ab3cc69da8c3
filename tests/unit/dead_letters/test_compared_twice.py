"""What several comparisons of numbers and entries say together."""

from __future__ import annotations

import pytest

from airflow_provider_jetstream.jetstream.dead_letters.reconciliation import Reconciliation


@pytest.mark.parametrize(
    ("before", "now", "left"),
    [
        ({"a": 2}, {"a": 2}, {"a": 2}),
        # One has left, and what died since was read with its entry.
        ({"a": 2}, {"a": 1}, {"a": 1}),
        ({"a": 1}, {"a": 3}, {"a": 1}),
        ({"a": 0, "b": 1}, {"a": 1, "b": 1}, {"a": 0, "b": 1}),
        # One that couldn't be counted before, or whose numbers contradicted entries, bounds nothing.
        ({"a": 1}, {"a": 0, "b": 50}, {"a": 0, "b": 50}),
        # Nor does one that can't be counted now have a count; its bounds are counted by themselves.
        ({"a": 1, "b": 2}, {"a": 1}, {"a": 1}),
        ({}, {}, {}),
    ],
)
def test_of_each_consumer_the_least_difference_counts(
    before: dict[str, int], now: dict[str, int], left: dict[str, int]
) -> None:
    others = 7
    reconciliation = Reconciliation(uncertain=others + sum(now.values()), unnamed=now)
    reconciliation.believe_least(Reconciliation(uncertain=sum(before.values()), unnamed=before))
    assert (reconciliation.unnamed, reconciliation.uncertain) == (left, others + sum(left.values()))
