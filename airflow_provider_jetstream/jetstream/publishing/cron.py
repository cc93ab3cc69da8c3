"""Cron expressions as nats-server reads them: six fields, the first for seconds.

Protocol: NATS ADR-51. Checked before anything is sent, since the server says no more than that a pattern is invalid.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Field(NamedTuple):
    name: str
    least: int
    most: int
    words: tuple[str, ...] = ()


_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_FIELDS = (
    _Field("seconds", 0, 59),
    _Field("minutes", 0, 59),
    _Field("hours", 0, 23),
    _Field("days of the month", 1, 31),
    _Field("months", 1, 12, _MONTHS),
    _Field("weekdays", 0, 6, _WEEKDAYS),
)
_DAY, _MONTH, _WEEKDAY = 3, 4, 5
_LONGEST = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)

_ANY = frozenset({"*", "?"})
_ITEM = re.compile(r"(?:[*?]|(?P<first>[0-9]+|[a-z]+)(?:-(?P<last>[0-9]+|[a-z]+))?)(?P<step>/0*[1-9][0-9]*)?")

CRON_FIELDS = len(_FIELDS)


def cron_problem(fields: Sequence[str]) -> str | None:
    """Tell what is wrong with a cron expression.

    :param fields: its six fields
    :return: what was expected and what was found; ``None`` where the server takes it
    """
    values: list[frozenset[int]] = []
    for field, text in zip(_FIELDS, fields, strict=True):
        if (found := _read(field, text)) is None:
            words = f" or {field.words[0]} to {field.words[-1]}" if field.words else ""
            return (
                f"expected {field.name} of {field.least} to {field.most}{words}, ranges such as"
                f" {field.least}-{field.least + 1}, steps such as */2, or lists of these, found {text!r}"
            )
        values.append(found)
    # Where weekdays are given too, the server takes either.
    if fields[_WEEKDAY] in _ANY and min(values[_DAY]) > max(_LONGEST[month - 1] for month in values[_MONTH]):
        return f"expected a date that there is, found day {fields[_DAY]} of month {fields[_MONTH]}, which never comes"
    return None


def _read(field: _Field, text: str) -> frozenset[int] | None:
    found: set[int] = set()
    for item in text.lower().split(","):
        match = _ITEM.fullmatch(item)
        if match is None:
            return None
        step = int((match["step"] or "/1").removeprefix("/"))
        if match["first"] is None:
            first, last = field.least, field.most
        else:
            first = _number(field, match["first"])
            # With a step, a single number is where to begin.
            last = _number(field, match["last"] or (str(field.most) if match["step"] else match["first"]))
        if not field.least <= first <= last <= field.most:
            return None
        found.update(range(first, last + 1, step))
    return frozenset(found)


def _number(field: _Field, text: str) -> int:
    if text in field.words:
        return field.least + field.words.index(text)
    return int(text) if text.isdecimal() else -1
