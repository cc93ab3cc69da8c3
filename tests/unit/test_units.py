from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.units import (
    format_duration,
    parse_duration,
    parse_seconds,
    parse_size,
    parse_time,
)

_UNITS = {
    "ns": 1,
    "us": 10**3,
    "µs": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3_600 * 10**9,
    "d": 86_400 * 10**9,
    "w": 604_800 * 10**9,
}
_CENTURIES = 2**63 - 1


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        ("30s", 30_000_000_000),
        ("1h30m", 5_400_000_000_000),
        ("7d", 604_800_000_000_000),
        ("2m0s", 120_000_000_000),
        ("1.5s", 1_500_000_000),
        ("250ms", 250_000_000),
        (" 5s ", 5_000_000_000),
        ("0", 0),
        ("-1", -1),
    ],
)
def test_a_duration_is_parsed_from_text(text: str, nanoseconds: int) -> None:
    assert parse_duration(text) == nanoseconds


@given(st.integers(min_value=-1, max_value=_CENTURIES))
def test_a_formatted_duration_is_parsed_back_exactly(nanoseconds: int) -> None:
    assert parse_duration(format_duration(nanoseconds)) == nanoseconds


@given(st.integers(min_value=0, max_value=15_000), st.sampled_from(sorted(_UNITS)))
def test_every_unit_is_exact(number: int, unit: str) -> None:
    assert parse_duration(f"{number}{unit}") == number * _UNITS[unit]


@given(st.timedeltas(min_value=timedelta(), max_value=timedelta(days=106_751)))
def test_a_timedelta_is_parsed_to_the_microsecond(value: timedelta) -> None:
    expected = ((value.days * 86_400 + value.seconds) * 1_000_000 + value.microseconds) * 1_000
    assert parse_duration(value) == expected


@given(st.integers(min_value=1_000_000, max_value=_CENTURIES) | st.sampled_from([0, -1]))
def test_an_integer_is_nanoseconds(nanoseconds: int) -> None:
    assert parse_duration(nanoseconds) == nanoseconds


@pytest.mark.parametrize(
    "text", ["99999999999w", "292y", f"{2**63}ns", timedelta.max, 2**63, "9" * 5_000, "1s" * 100_000]
)
def test_what_the_server_cannot_count_is_refused_at_once_in_few_words(text: Any) -> None:
    # Where the time grows with the square of the length, the last takes hours.
    for parse in (parse_duration, parse_seconds, parse_size):
        with pytest.raises(ValueError, match=r"expected .* found") as caught:
            parse(text)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("512", 512),
        ("512B", 512),
        ("1KB", 1_024),
        ("256MB", 268_435_456),
        ("256 MB", 268_435_456),
        ("1MiB", 1_048_576),
        ("1MIB", 1_048_576),
        ("2g", 2_147_483_648),
        ("1TB", 1_099_511_627_776),
        ("-1", -1),
        (-1, -1),
        (0, 0),
        (7, 7),
    ],
)
def test_a_size_is_parsed_in_powers_of_1024(value: str | int, size: int) -> None:
    assert parse_size(value) == size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-21T09:00:00Z", datetime(2026, 11, 21, 9, tzinfo=UTC)),
        (" 2026-11-21t10:00:00.5+01:00", datetime(2026, 11, 21, 9, 0, 0, 500_000, tzinfo=UTC)),
        # Go writes nanoseconds.
        ("2026-11-21 09:00:00.123456789z", datetime(2026, 11, 21, 9, 0, 0, 123_456, tzinfo=UTC)),
        ("0001-01-01T23:59:00+23:59", datetime(1, 1, 1, tzinfo=UTC)),
    ],
)
def test_a_time_is_parsed_as_rfc_3339_has_it(text: str, expected: datetime) -> None:
    assert parse_time(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "now", "2026-11-21", "20261121T090000Z", "2026-11-21T09:00:00", "2026-11-21T24:00:01Z", "x" * 10_000),
        *("0001-01-01T00:00:00+00:01", "9999-12-31T23:59:59-23:59", f"2026-11-21T09:00:00.{'0' * 1_000}Z"),
    ],
)
def test_what_is_no_time_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match='expected a time such as "2026-11-21T09:00:00Z", found'):
        parse_time(text)
