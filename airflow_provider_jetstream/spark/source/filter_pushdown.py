"""Filters of a query as bounds and subjects of a read.

Spark checks every filter again on what comes back, so a bound only has to be no tighter than the filter.
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
    """What a query can want.

    :param low: the lowest sequence
    :param high: the highest sequence, if there is one
    :param since: the earliest time in nanoseconds since 1970, if there is one
    :param until: the latest time in nanoseconds since 1970, if there is one
    :param subjects: filters of subjects; ``None`` for every subject, empty for none
    """

    low: int = 1
    high: int | None = None
    since: int | None = None
    until: int | None = None
    subjects: tuple[str, ...] | None = None


def push_down(filters: Iterable[Filter], subjects: Sequence[str]) -> PushedBounds:
    """Find out what a query can want.

    :param filters: all of which must hold
    :param subjects: those that the read is restricted to, all where empty
    :return: what is left
    """
    result = PushedBounds(subjects=tuple(subjects) or None)
    for condition in filters:
        column = getattr(condition, "attribute", None)
        if column == ("seq",):
            result = _by_sequence(result, condition)
        elif column == ("timestamp",):
            result = _by_time(result, condition)
        elif column == ("subject",):
            result = _by_subject(result, condition)
    return result


def _by_sequence(before: PushedBounds, condition: Filter) -> PushedBounds:
    if not (bounds := _bounds(condition, 1)):
        return before
    low, high = bounds
    highest = [bound for bound in (before.high, high) if bound is not None]
    return replace(before, low=max(before.low, low or 1), high=min(highest, default=None))


def _by_time(before: PushedBounds, condition: Filter) -> PushedBounds:
    # The column is cut to microseconds: a message may be up to one later than it says.
    if not (bounds := _bounds(condition, 0)):
        return before
    since, until = bounds
    earliest = [bound for bound in (before.since, since) if bound is not None]
    latest = [
        bound for bound in (before.until, None if until is None else until + _MICROSECOND - 1) if bound is not None
    ]
    return replace(before, since=max(earliest, default=None), until=min(latest, default=None))


def _bounds(condition: Filter, step: int) -> tuple[int | None, int | None] | None:
    """Give the lowest and the highest value that a condition allows, where it is about order."""
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


def _by_subject(before: PushedBounds, condition: Filter) -> PushedBounds:
    wanted = _subjects(condition)
    if wanted is None or len(wanted) > _MOST_SUBJECTS:
        return before
    if before.subjects is None:
        return replace(before, subjects=wanted)
    left: list[str] = []
    for one in before.subjects:
        for other in wanted:
            if covers(one, other):
                left.append(other)
            elif overlaps(one, other):
                left.append(one)
    distinct = tuple(dict.fromkeys(left))
    return before if first_overlap(distinct) else replace(before, subjects=distinct)


def _subjects(condition: Filter) -> tuple[str, ...] | None:
    from pyspark.sql.datasource import EqualNullSafe, EqualTo, In, StringStartsWith

    if isinstance(condition, EqualTo | EqualNullSafe):
        return _exact([condition.value])
    if isinstance(condition, In):
        return _exact(condition.value)
    if isinstance(condition, StringStartsWith):
        stem, dot, _ = condition.value.rpartition(".")
        wanted = f"{stem}.>"
        # Of a prefix that ends within a token, the whole tokens before it can be filtered.
        return (wanted,) if dot and not subject_problem(stem, wildcards=False) else None
    return None


def _exact(values: Sequence[object]) -> tuple[str, ...] | None:
    if not all(isinstance(value, str) for value in values):
        return None
    # No message has a subject that isn't one.
    return tuple(dict.fromkeys(str(value) for value in values if not subject_problem(str(value), wildcards=False)))
