"""The history of samples: gaps are gaps, many samples become few points, and forged samples aren't believed."""

from __future__ import annotations

import json
import zlib
from datetime import UTC, datetime, timedelta

import pytest

from airflow_provider_jetstream.jetstream.client.message import StoredMessage
from airflow_provider_jetstream.jetstream.contract import SAMPLE_SUBJECT
from airflow_provider_jetstream.jetstream.inspection.queue_state import Known, QueueState
from airflow_provider_jetstream.jetstream.inspection.samples import (
    SAMPLE_SECONDS,
    QueueSample,
    ServerSample,
    encode_sample,
    parse_sample,
)
from airflow_provider_jetstream.plugins.monitor.shared_history import HOUR, MAX_POINTS, SharedHistory

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


def test_a_time_without_samples_is_a_gap_and_has_no_rate_across_it() -> None:
    history = history_of(0, 1, 2, 30, 31)
    points = history.points("q", NOON, NOON + 31 * STEP)
    assert [point.pending for point in points] == [1, 2, None, 31]
    assert points[2].at == NOON + 3 * STEP
    assert (points[0].in_per_second, points[0].out_per_second) == (0.1, 0.05)
    assert points[-1].in_per_second == 0.1
    later = history.points("q", NOON, NOON + 60 * STEP)
    assert later[-1].pending is None
    assert history.points("q", NOON + 30 * STEP, NOON + 31 * STEP) == points[-1:]


def test_a_small_chart_has_gaps_too() -> None:
    chart = history_of(0, 1, 2, 90, 179).sparkline("q", 60)
    assert chart[-1] == 179
    assert None in chart
    assert chart[:2] == [1, 2]
    assert history_of(0).sparkline("other", 60) == []


def test_many_samples_become_few_points_that_keep_the_peaks() -> None:
    history = history_of(*range(181))
    points = history.points("q", NOON, NOON + HOUR)
    assert len(points) <= MAX_POINTS
    assert max(point.pending or 0 for point in points) == 180


def test_a_sample_is_parsed_as_it_was_stored() -> None:
    known = Known(QueueState.STUCK, NOON, None, NOON - STEP)
    queue = QueueSample("created", 1, 2, 3, 4, None, {"consumer:worker": known})
    parsed = parse_sample(message(encode_sample("host:1", {"q": queue})))
    assert parsed is not None
    assert (parsed.holder, parsed.queues, parsed.sequence) == ("host:1", {"q": queue}, 1)


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
