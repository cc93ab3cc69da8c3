"""Durations and sizes in JetStream's units, nanoseconds and bytes, also written as ``"30s"`` and ``"256MB"``; times."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any

from airflow_provider_jetstream.jetstream.limits import INTEGER, QUANTITY, TIME
from airflow_provider_jetstream.jetstream.line_text import shown_value

NANOSECONDS = 1_000_000_000

_DURATION_UNITS = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,
    "ms": 1_000_000,
    "s": NANOSECONDS,
    "m": 60 * NANOSECONDS,
    "h": 3_600 * NANOSECONDS,
    "d": 86_400 * NANOSECONDS,
    "w": 7 * 86_400 * NANOSECONDS,
}
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h|d|w)")

_NUMBER = re.compile(r"\d+(?:\.\d+)?")

_SIZE_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"(\d+)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)

# RFC 3339, section 5.6. Python's own parser accepts more, such as times without a zone.
_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)

_SHORTEST_PLAUSIBLE = 1_000_000
_UNLIMITED = -1
_LONGEST_SECONDS = INTEGER // NANOSECONDS

# What parse_duration and parse_size take, as JSON Schema; YAML has no timedelta.
DURATION_FORM: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "maxLength": QUANTITY, "pattern": rf"^\s*(0|-1|({_DURATION_PART.pattern})+)\s*$"},
        {"type": "integer", "enum": [_UNLIMITED, 0]},
        {"type": "integer", "minimum": _SHORTEST_PLAUSIBLE, "maximum": INTEGER},
    ],
    "examples": ["30s", "1h30m", "7d"],
}
SIZE_FORM: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "maxLength": QUANTITY, "pattern": r"^\s*(-1|\d+\s*[KMGTkmgt]?([Ii]?[Bb])?)\s*$"},
        {"type": "integer", "minimum": _UNLIMITED, "maximum": INTEGER},
    ],
    "examples": ["256MB", "1GiB", -1],
}


def parse_duration(value: Any) -> int:
    """Parse a duration into nanoseconds.

    :param value: nanoseconds as an integer (JetStream's own unit), a :class:`~datetime.timedelta` or one of a subclass,
        such as ``pendulum.duration(minutes=5)``, or text such as ``"30s"``, ``"1h30m"``, ``"7d"``; ``-1`` and ``0``
        mean "no limit" as they do for the server
    :raises ValueError: if it is none of these, has no fixed length (years, months), or is longer than the 292 years
        that the server can count
    """
    nanoseconds = _nanoseconds(value)
    if nanoseconds > INTEGER:
        raise ValueError(f'expected a duration such as "30s", of at most 292 years, found {shown_value(value)}')
    return nanoseconds


def _nanoseconds(value: Any) -> int:
    if isinstance(value, timedelta):
        return _nanoseconds_of_timedelta(value)
    if isinstance(value, str):
        text = short_text(value)
        if text in ("0", "-1"):
            return int(text)
        parts = _DURATION_PART.findall(text)
        if not parts or "".join(number + unit for number, unit in parts) != text:
            raise ValueError(f'expected a duration such as "30s", "1h30m" or "7d", found {shown_value(value)}')
        return round(sum(Fraction(number) * _DURATION_UNITS[unit] for number, unit in parts))
    if isinstance(value, int) and not isinstance(value, bool) and value >= _UNLIMITED:
        if 0 < value < _SHORTEST_PLAUSIBLE:
            raise ValueError(
                f"a bare number is nanoseconds, as in JetStream's own configuration, and {value} ns is shorter than"
                f' any limit: write "{value}s" for seconds'
            )
        return value
    raise ValueError(
        f'expected a duration such as "30s" or nanoseconds as an integer, found {shown_value(value)}{_advice(value)}'
    )


def _nanoseconds_of_timedelta(value: timedelta) -> int:
    if _has_calendar_units(value):
        raise ValueError(f"expected a duration of a fixed length, found {shown_value(value)}{_advice(value)}")
    # Classes that inherit from timedelta agree with it in this method only: pendulum's can't be divided by one, and
    # the base of pandas' is 0 in units of whole seconds.
    seconds = value.total_seconds()
    if not 0 <= seconds <= _LONGEST_SECONDS:
        raise ValueError(f'expected a duration such as "30s", of at most 292 years, found {shown_value(value)}')
    if type(value) is timedelta:
        return value // timedelta(microseconds=1) * 1_000
    # One above 0 isn't rounded to 0, which is "no limit".
    return round(seconds * 1e6) * 1_000 or int(bool(value))


def _has_calendar_units(value: Any) -> bool:
    """Return whether a duration has years or months of its own; those of an interval between two times are computed."""
    return not hasattr(value, "start") and bool(getattr(value, "years", 0) or getattr(value, "months", 0))


def _advice(value: Any) -> str:
    """Return what to use in place of a duration of another library."""
    if _has_calendar_units(value):
        return ": years and months have no fixed length; use days, such as timedelta(days=30)"
    if hasattr(value, "years") and hasattr(value, "hours"):
        return ": use a timedelta with the same days, hours and seconds"
    if type(value).__name__ == "timedelta64":
        return ": use a timedelta, such as value.astype('timedelta64[us]').item()"
    return ""


def short_text(text: str, most: int = QUANTITY) -> str:
    """Return text without white space around it; nothing where it is longer than any number, duration or time.

    Python's own conversions, and patterns that try each place of a text, take a time that grows with its square.
    """
    return text.strip() if len(text) <= most else ""


def parse_seconds(value: Any) -> float:
    """Parse a duration into seconds, where a number means seconds as it does in Python.

    :param value: seconds as a number or as text, a :class:`~datetime.timedelta`, or text such as ``"30s"``, ``"1h30m"``
    :raises ValueError: if it is none of these, negative, or longer than 292 years
    """
    seconds = float(text) if isinstance(value, str) and _NUMBER.fullmatch(text := short_text(value)) else value
    if isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 <= seconds <= _LONGEST_SECONDS:
        return float(seconds)
    if isinstance(seconds, str | timedelta) and (nanoseconds := parse_duration(seconds)) >= 0:
        return nanoseconds / NANOSECONDS
    raise ValueError(
        'expected seconds or a duration such as "30s" or "1h30m", of at most 292 years, found'
        f" {shown_value(value)}{_advice(value)}"
    )


def parse_size(value: Any) -> int:
    """Parse a size into bytes.

    :param value: bytes as an integer, or text such as ``"512"``, ``"256MB"``, ``"1MiB"``; every unit is a power of
        1024, as in the ``nats`` command line; ``-1`` means "no limit"
    :raises ValueError: if it is neither
    """
    size: Any = value
    if isinstance(value, str):
        text = short_text(value)
        if match := _SIZE.fullmatch(text):
            number, unit = match.groups()
            size = int(number) << 10 * _SIZE_POWERS[unit.upper()]
        elif text == "-1":
            size = _UNLIMITED
    if isinstance(size, int) and not isinstance(size, bool) and _UNLIMITED <= size <= INTEGER:
        return size
    raise ValueError(f'expected a size such as "256MB" or bytes as an integer, found {shown_value(value)}')


def parse_time(text: str) -> datetime:
    """Parse a time of RFC 3339.

    :raises ValueError: it is none, has no time zone, or lies outside of the years 1 to 9999 in UTC
    """
    stated = short_text(text, TIME)
    if not _TIME.fullmatch(stated):
        raise ValueError(f'expected a time such as "2026-11-21T09:00:00Z", found {shown_value(text)}')
    try:
        moment = datetime.fromisoformat(stated.upper())
        # So that nobody who converts it fails.
        moment.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise ValueError(
            f'expected a time such as "2026-11-21T09:00:00Z", found {shown_value(text)}: {error}'
        ) from None
    return moment


def format_duration(nanoseconds: int) -> str:
    """Format a duration in the largest unit that divides it, as :func:`parse_duration` parses it."""
    if nanoseconds <= 0:
        return str(nanoseconds)
    for unit in ("d", "h", "m", "s", "ms", "us"):
        if nanoseconds % _DURATION_UNITS[unit] == 0:
            return f"{nanoseconds // _DURATION_UNITS[unit]}{unit}"
    return f"{nanoseconds}ns"


def format_size(size: int) -> str:
    """Format a size in the largest unit that divides it, as :func:`parse_size` parses it."""
    for unit in ("TB", "GB", "MB", "KB"):
        if size > 0 and size % (1 << 10 * _SIZE_POWERS[unit[0]]) == 0:
            return f"{size >> 10 * _SIZE_POWERS[unit[0]]}{unit}"
    return str(size)
