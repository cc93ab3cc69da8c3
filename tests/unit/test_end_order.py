"""Whether an end is about the message that is stored now, by the server's times: every case of clocks and restarts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from airflow_provider_jetstream.jetstream.dead_letters.end_order import CLOCK_SKEW, Order, ServerTimes

_STORED = datetime(2026, 11, 27, 12, tzinfo=UTC)
_ALONE = {"clustered": False}
_CLUSTER = {"clustered": True}


@pytest.mark.parametrize(
    ("seconds", "up_since", "clustered", "expected"),
    [
        # One clock and no restart since: the order is exact, in the same microsecond too.
        (0.0, -60.0, False, Order.AFTER),
        (0.001, -60.0, False, Order.AFTER),
        (-0.001, -60.0, False, Order.BEFORE),
        # A restart since, or an unknown one: near ends are unclear, since the clock may have been set.
        (0.0, 30.0, False, Order.UNCLEAR),
        (4.9, None, False, Order.UNCLEAR),
        (5.0, None, False, Order.AFTER),
        (-0.001, None, False, Order.BEFORE),
        # Several clocks: nothing near is clear, unless no sequence can have been given twice.
        (-4.9, None, True, Order.UNCLEAR),
        (4.9, 0.0, True, Order.UNCLEAR),
        (-5.1, None, True, Order.BEFORE),
        (5.0, None, True, Order.AFTER),
        (-4.9, -60.0, True, Order.AFTER),
        (0.0, -60.0, True, Order.AFTER),
        (-5.1, -60.0, True, Order.BEFORE),
    ],
)
def test_an_end_counts_for_the_message_after_which_it_was_stored(
    seconds: float, up_since: float | None, *, clustered: bool, expected: Order
) -> None:
    up = None if up_since is None else _STORED + timedelta(seconds=up_since)
    times = ServerTimes(clustered=clustered, up_since=up)
    assert times.bearing(_STORED + timedelta(seconds=seconds), _STORED) is expected


@pytest.mark.parametrize("skew", [-3600.0, -1.0, 0.0, 1.0, 3600.0])
@pytest.mark.parametrize("clustered", [False, True])
def test_an_end_that_names_when_its_job_was_stored_is_judged_by_no_clock(skew: float, *, clustered: bool) -> None:
    times, at = ServerTimes(clustered=clustered), _STORED + timedelta(seconds=skew)
    nanoseconds = int(_STORED.timestamp()) * 10**9
    assert times.bearing(at, _STORED, nanoseconds + 123) is Order.AFTER
    assert times.bearing(at, _STORED, nanoseconds - 5 * 10**9) is Order.BEFORE
    assert times.bearing(at, _STORED, nanoseconds + 5 * 10**9) is Order.BEFORE


def test_no_difference_of_clocks_up_to_the_stated_one_makes_an_earlier_end_count() -> None:
    """The end is stored, then the server restarts, then the message is stored: whichever clocks say when."""
    for milliseconds in range(0, int(CLOCK_SKEW.total_seconds() * 1000), 50):
        ahead = _STORED + timedelta(milliseconds=milliseconds)
        for clustered in (False, True):
            for up_since in (None, _STORED):
                if not clustered and up_since:
                    continue
                assert ServerTimes(clustered=clustered, up_since=up_since).bearing(ahead, _STORED) is not Order.AFTER
