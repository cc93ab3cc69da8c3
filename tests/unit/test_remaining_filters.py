"""What a consumer keeps when others take a part of its subjects."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any, overlaps
from airflow_provider_jetstream.jetstream.provisioning.remaining_filters import remaining_filters

_PARTITIONS = ["tasks.0.>", "tasks.1.>", "tasks.2.>"]


@pytest.mark.parametrize(
    ("filters", "taken", "subjects", "kept"),
    [
        (["tasks.>"], _PARTITIONS, ["tasks.0.email"], []),
        (["tasks.>"], _PARTITIONS, ["tasks.email", "tasks.1.email"], ["tasks.*"]),
        (["tasks.>"], _PARTITIONS, ["tasks.7.email", "tasks.7.resize"], ["tasks.7.*"]),
        (["tasks.>"], ["tasks.*.high", "tasks.*.low"], ["tasks.1.mid"], ["tasks.1.mid"]),
        (["jobs.*.*"], ["jobs.high.*", "jobs.low.*"], [], []),
        (["jobs.*.*"], ["jobs.high.*", "jobs.low.*"], ["jobs.mid.a", "jobs.mid.b"], ["jobs.mid.*"]),
        (["a", "b.>"], ["b.1.*"], ["a", "b.2", "b.1.x.y"], ["a", "b.*.*.*", "b.*"]),
        (["tasks.>"], [">"], ["tasks.email"], []),
    ],
)
def test_what_nobody_takes_is_kept_as_far_as_wildcards_go(
    filters: list[str], taken: list[str], subjects: list[str], kept: list[str]
) -> None:
    assert list(remaining_filters(filters, taken, subjects)) == kept


_TOKEN = st.sampled_from(["a", "b", "*"])
_FILTER = st.builds(
    lambda tokens, rest: ".".join([*tokens, *([">"] if rest else [])]),
    st.lists(_TOKEN, min_size=1, max_size=3),
    st.booleans(),
)
_SUBJECT = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=4).map(".".join)


@given(_FILTER, st.lists(_FILTER, min_size=1, max_size=3), st.lists(_SUBJECT, max_size=5))
def test_every_stored_job_has_one_consumer_and_no_filter_is_wider_than_before(
    before: str, taken: list[str], subjects: list[str]
) -> None:
    kept = remaining_filters([before], taken, subjects)
    for subject in subjects:
        if covered_by_any([before], subject):
            assert covered_by_any(taken, subject) != covered_by_any(kept, subject)
    assert not any(overlaps(one, other) for one in kept for other in taken)
    assert not any(overlaps(*pair) for pair in combinations(kept, 2))
    assert all(covered_by_any([before], subject) for subject in kept)
