"""A lease that anybody may have written is read, whatever it says."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_provider_jetstream.jetstream.audit.lease import LeaseState, _parse


@pytest.mark.parametrize("since", ["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59"])
def test_a_lease_since_a_time_that_utc_does_not_have_is_not_understood(since: str) -> None:
    message: Any = SimpleNamespace(data=json.dumps({"operation": "redrive", "seconds": 30, "since": since}).encode())
    lease = _parse(message)
    now = datetime.now(UTC)
    assert "isn't understood" in str(LeaseState(lease, 1, lease.since or now, now))


def test_the_beginning_of_a_lease_is_in_utc() -> None:
    message: Any = SimpleNamespace(
        data=json.dumps({"operation": "redrive", "seconds": 30, "since": "2026-11-22T10:00:00+02:00"}).encode()
    )
    lease = _parse(message)
    assert lease.since == datetime(2026, 11, 22, 8, tzinfo=UTC)
    assert "since 2026-11-22T08:00:00Z" in str(LeaseState(lease, 1, lease.since, lease.since))
