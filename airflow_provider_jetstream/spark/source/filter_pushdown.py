"""Converts a query's filters to bounds and subjects of a read.

Spark applies every filter again to what comes back, so a bound only has to be no tighter than the filter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.subjects import covers, first_overlap, overlaps, subject_problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyspark.sql.datasource import Filter

_MICROSECOND = 1_000
# More subjects than this aren't worth a filter each.
_MOST_SUBJECTS = 32
_EPOCH = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True)
class PushedBounds:
    """The messages that a query's filters can match.

    :param low: the lowest sequence
    :param high: the highest sequence
    :param since: the earliest time in nanoseconds since 1970
    :param until: the latest time in nanoseconds since 1970
    :param subjects: filters of subjects; ``None`` for every subject, empty for none
    """

    low: int = 1
    high: int | None = None
    since: int | None = None
    until: int | None = None
    subjects: tuple[str, ...] | None = None


def push_down(filters: Iterable[Filter], subjects: Sequence[str]) -> PushedBounds:
    """Convert filters, all of which must hold, to bounds.

    :param subjects: those that the read is restricted to, all where empty
    """
    bounds = PushedBounds(subjects=tuple(subjects) or None)
    for condition in filters:
        column = getattr(condition, "attribute", None)
        if column == ("seq",):
            bounds = _by_sequence(bounds, condition)
        elif column == ("timestamp",):
            bounds = _by_time(bounds, condition)
        elif column == ("subject",):
            bounds = _by_subject(bounds, condition)
    return bounds


def _by_sequence(bounds: PushedBounds, condition: Filter) -> PushedBounds:
    if not (limits := _limits(condition, 1)):
        return bounds
    low, high = limits
    highest = [limit for limit in (bounds.high, high) if limit is not None]
    return replace(bounds, low=max(bounds.low, low or 1), high=min(highest, default=None))


def _by_time(bounds: PushedBounds, condition: Filter) -> PushedBounds:
    # The column is cut to microseconds: a message may be up to one later than the column says.
    if not (limits := _limits(condition, 0)):
        return bounds
    since, until = limits
    earliest = [limit for limit in (bounds.since, since) if limit is not None]
    latest = [
        limit for limit in (bounds.until, None if until is None else until + _MICROSECOND - 1) if limit is not None
    ]
    return replace(bounds, since=max(earliest, default=None), until=min(latest, default=None))


def _limits(condition: Filter, step: int) -> tuple[int | None, int | None] | None:
    """Return the lowest and the highest value that an ordering condition allows."""
    from pyspark.sql.datasource import (
        EqualNullSafe,
        EqualTo,
        GreaterThan,
        GreaterThanOrEqual,
        In,
        LessThan,
        LessThanOrEqual,
    )

    if isinstance(condition, In):
        values = [_number(value) for value in condition.value]
        known = [value for value in values if value is not None]
        return (min(known), max(known)) if known and len(known) == len(values) else None
    value = _number(getattr(condition, "value", None))
    if value is None:
        return None
    both, above, below = (value, value), (value, None), (None, value)
    allowed: dict[type, tuple[int | None, int | None]] = {
        EqualTo: both,
        EqualNullSafe: both,
        GreaterThanOrEqual: above,
        GreaterThan: (value + step, None),
        LessThanOrEqual: below,
        LessThan: (None, value - step),
    }
    return allowed.get(type(condition))


def _number(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, datetime):
        since = (value if value.tzinfo else value.astimezone()) - _EPOCH
        return (since.days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * _MICROSECOND
    return None


def _by_subject(bounds: PushedBounds, condition: Filter) -> PushedBounds:
    subjects = _subjects(condition)
    if subjects is None or len(subjects) > _MOST_SUBJECTS:
        return bounds
    if bounds.subjects is None:
        return replace(bounds, subjects=subjects)
    common: list[str] = []
    for restricted in bounds.subjects:
        for subject in subjects:
            if covers(restricted, subject):
                common.append(subject)
            elif overlaps(restricted, subject):
                common.append(restricted)
    distinct = tuple(dict.fromkeys(common))
    return bounds if first_overlap(distinct) else replace(bounds, subjects=distinct)


def _subjects(condition: Filter) -> tuple[str, ...] | None:
    from pyspark.sql.datasource import EqualNullSafe, EqualTo, In, StringStartsWith

    if isinstance(condition, EqualTo | EqualNullSafe):
        return _valid_subjects([condition.value])
    if isinstance(condition, In):
        return _valid_subjects(condition.value)
    if isinstance(condition, StringStartsWith):
        stem, dot, _ = condition.value.rpartition(".")
        # Of a prefix that ends within a token, only the whole tokens before it can be filtered.
        return (f"{stem}.>",) if dot and not subject_problem(stem, wildcards=False) else None
    return None


def _valid_subjects(values: Sequence[object]) -> tuple[str, ...] | None:
    if not all(isinstance(value, str) for value in values):
        return None
    # No message has an invalid subject.
    return tuple(dict.fromkeys(str(value) for value in values if not subject_problem(str(value), wildcards=False)))
