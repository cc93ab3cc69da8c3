"""The bodies of pull requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from airflow_provider_jetstream.jetstream.client.pull_request import priority_fields, pull_request, pull_subject


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"expires": 0.02}, {"expires": 20_000_000}),
        ({"no_wait": True, "max_bytes": 1}, {"no_wait": True, "max_bytes": 1}),
        ({"expires": 30, "idle_heartbeat": 5}, {"expires": 30_000_000_000, "idle_heartbeat": 5_000_000_000}),
        ({"priority": {"group": "jobs", "priority": 1}}, {"group": "jobs", "priority": 1}),
    ],
)
def test_a_request_has_the_given_fields_only(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert json.loads(pull_request(5, **fields)) == {"batch": 5, **expected}


def test_the_subject_has_the_prefix_of_the_api() -> None:
    assert pull_subject("jobs", "worker", "$JS.API") == "$JS.API.CONSUMER.MSG.NEXT.jobs.worker"
    assert pull_subject("jobs", "worker", "$JS.hub.API") == "$JS.hub.API.CONSUMER.MSG.NEXT.jobs.worker"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"priority_groups": ["a"], "priority_policy": "overflow"}, {"group": "a"}),
        ({"priority_groups": ["a"], "priority_policy": "prioritized"}, {"group": "a", "priority": 3}),
    ],
)
def test_a_group_is_named_where_the_consumer_has_groups(config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert priority_fields(config, 3) == expected
