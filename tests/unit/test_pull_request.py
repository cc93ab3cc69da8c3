"""The bodies of pull requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from airflow_provider_jetstream.jetstream.client.stream_api import pull_request


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
