"""What a consumer keeps when others take a part of its subjects."""

from __future__ import annotations

import pytest

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
