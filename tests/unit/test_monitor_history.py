"""The history of samples: gaps are gaps, many samples become few points, and forged samples aren't believed."""

from __future__ import annotations

import json
import zlib
from datetime import UTC, datetime, timedelta

import pytest

from airflow_provider_jetstream.jetstream.client.message import StoredMessage
from airflow_provider_jetstream.jetstream.contract import SAMPLE_SUBJECT
from airflow_provider_jetstream.jetstream.inspection.samples import (
    SAMPLE_SECONDS,
    QueueSample,
    ServerSample,
    parse_sample,
)
from airflow_provider_jetstream.plugins.monitor.history import SharedHistory

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
STEP = timedelta(seconds=SAMPLE_SECONDS)


def history_of(*steps: int) -> SharedHistory:
    """Return the history of samples at some multiples of twenty seconds."""
    history = SharedHistory()
    for number in steps:
        queue = QueueSample("created", number, 1, number, 2 * number, 5)
        history.add(ServerSample("worker", {"q": queue}, NOON + number * STEP, number + 1))
    return history


def message(data: bytes) -> StoredMessage:
    return StoredMessage(SAMPLE_SUBJECT, 1, "2026-01-01T12:00:00Z", (), data)


def test_a_small_chart_has_gaps_too() -> None:
    chart = history_of(0, 1, 2, 90, 179).sparkline("q", 60)
    assert chart[-1] == 179
    assert None in chart
    assert chart[:2] == [1, 2]
    assert history_of(0).sparkline("other", 60) == []


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\xff", b"{}", zlib.compress(b"[]"), zlib.compress(b"{}"), zlib.compress(b"[" * 100_000)),
        zlib.compress(b'{"holder": "x", "queues": []}'),
        *(
            zlib.compress(json.dumps({"holder": "x", "queues": {"q": item}}).encode())
            for item in (1, [], ["c", 1, 1, 1, 1, None, {"k": ["unheard", 1, 1, 1]}], ["c", 1, 1, 1, 1, 1, {"k": 5}])
        ),
        zlib.compress(b'{"holder": "x", "queues": {"q": ["c", 1, 1, 1, 1, 1, {"k": ["idle", 1e300, null, null]}]}}'),
    ],
)
def test_what_is_no_sample_is_none(data: bytes) -> None:
    assert parse_sample(message(data)) is None
