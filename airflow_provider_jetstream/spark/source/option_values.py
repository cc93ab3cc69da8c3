"""The values of the data source's options: each parser raises ``ValueError`` that says what was expected."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from airflow_provider_jetstream.jetstream.client.subjects import covers, first_overlap, subject_problem
from airflow_provider_jetstream.jetstream.units import parse_seconds, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable

_Value = TypeVar("_Value")

_EXTREMES = ("earliest", "latest")
_MILLISECOND = 1_000_000


@dataclass(frozen=True)
class Bound:
    """Where a read begins or ends: one of these.

    :param extreme: ``earliest`` or ``latest``
    :param sequence: a sequence
    :param time: nanoseconds since 1970
    """

    extreme: str | None = None
    sequence: int | None = None
    time: int | None = None


def at_least(low: int) -> Callable[[str], int]:
    """Parse a whole number that isn't smaller."""
    return between(low, (1 << 63) - 1)


def between(low: int, high: int) -> Callable[[str], int]:
    """Parse a whole number between two, including these."""

    def convert(text: str) -> int:
        if not text.strip().isdecimal() or not low <= int(text) <= high:
            raise ValueError(f"expected a whole number from {low} to {high}")
        return int(text)

    return convert


def boolean(text: str) -> bool:
    """Parse ``true`` or ``false``, in any case."""
    if text.strip().lower() not in ("true", "false"):
        raise ValueError("expected true or false")
    return text.strip().lower() == "true"


def one_of(names: tuple[str, ...]) -> Callable[[str], str]:
    """Parse one of some words, in any case."""

    def convert(text: str) -> str:
        if text.strip().lower() not in names:
            raise ValueError(f"expected one of {', '.join(names)}")
        return text.strip().lower()

    return convert


def byte_size(text: str) -> int:
    """Parse a number of bytes, such as ``4MB``."""
    size = parse_size(text)
    if size < 1:
        raise ValueError('expected a size such as "4MB"')
    return size


def positive_seconds(text: str) -> float:
    """Parse a duration such as ``30s``; a number means seconds."""
    seconds = parse_seconds(text)
    if not seconds:
        raise ValueError('expected a duration above 0 such as "30s"')
    return seconds


def filter_subjects(text: str) -> tuple[str, ...]:
    """Parse subjects separated by commas, which don't overlap."""
    filters = tuple(subject.strip() for subject in text.split(","))
    for subject in filters:
        if problem := subject_problem(subject):
            raise ValueError(f"expected subjects with commas between them ({problem})")
    if pair := first_overlap(filters):
        cover = next((wide for wide, narrow in (pair, pair[::-1]) if covers(wide, narrow)), None)
        hint = f"keep {cover}" if cover else "filter after reading"
        raise ValueError(f"expected subjects that don't overlap, found that {' and '.join(pair)} do: {hint}")
    return filters


def exact_subject(text: str) -> str:
    """Parse a subject without wildcards."""
    if problem := subject_problem(text, wildcards=False):
        raise ValueError(f"expected a subject without wildcards ({problem})")
    return text


def _matching(form: re.Pattern[str], expected: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if not form.fullmatch(text):
            raise ValueError(f"expected {expected}")
        return text

    return convert


_STREAM_NAME = re.compile(r"[^\s.*>/\\]+")
_STREAM_GLOB = re.compile(r"[^\s.>/\\]+")
stream_name = _matching(_STREAM_NAME, "a stream's name, without dots, spaces and wildcards")
bucket_name = _matching(re.compile(r"[A-Za-z0-9_-]+"), "a bucket's name: letters, digits, - and _")
token = _matching(re.compile(r"[A-Za-z0-9_$.-]+"), "letters, digits, dots, - and _")


def stream_names(text: str) -> tuple[str, ...]:
    """Parse names of streams with commas between them."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if not _STREAM_NAME.fullmatch(name):
            raise ValueError(f"expected names of streams with commas between them, found {name!r} among them")
        if names.count(name) > 1:
            raise ValueError(f"expected each stream once, found {name} twice: drop one")
    return names


def stream_glob(text: str) -> str:
    """Parse a pattern of streams' names, in which ``*``, ``?`` and ``[…]`` are wildcards."""
    if not _STREAM_GLOB.fullmatch(text.strip()):
        raise ValueError(
            "expected a pattern such as orders-* with the wildcards *, ? and […], and without dots and spaces, which no"
            " stream's name has (it is no regular expression)"
        )
    return text.strip()


def is_object(text: str) -> bool:
    """Return whether a value is written as a JSON object."""
    return text.lstrip().startswith("{")


def object_of(convert: Callable[[str], _Value]) -> Callable[[str], dict[str, _Value]]:
    """Parse a JSON object with a value for each stream."""

    def parse(text: str) -> dict[str, _Value]:
        try:
            pairs = json.loads(text, object_pairs_hook=list)
        except (ValueError, RecursionError):
            raise ValueError('expected a JSON object such as {"orders": 17}') from None
        values: dict[str, _Value] = {}
        for name, value in pairs:
            if name in values:
                raise ValueError(f"expected each stream once, found {name} twice: drop one")
            values[name] = _converted(name, value, convert)
        return values

    return parse


def _converted(name: str, value: Any, convert: Callable[[str], _Value]) -> _Value:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"expected a text or a number for {name}, found {value!r}")  # as all parsers
    try:
        return convert(str(value))
    except ValueError as error:
        problem = str(error) if "found" in str(error) else f"{error}, found {value!r}"
        raise ValueError(f"{name}: {problem}") from None


def id_prefix(text: str) -> str:
    """Parse what message ids begin with."""
    if not text or not text.isprintable():
        raise ValueError("expected printable text")
    return text


def bound(text: str) -> Bound:
    """Parse ``earliest``, ``latest`` or a sequence."""
    if (name := text.strip().lower()) in _EXTREMES:
        return Bound(extreme=name)
    try:
        return Bound(sequence=at_least(1)(text))
    except ValueError:
        raise ValueError("expected earliest, latest or a sequence from 1") from None


def sequence_ranges(text: str) -> tuple[tuple[int, int], ...]:
    """Parse ranges of sequences with commas between them, such as ``101-150,200-210``."""
    ranges: list[tuple[int, int]] = []
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not first.isdecimal() or not (last if dash else first).isdecimal() or int(last or first) < int(first):
            raise ValueError("expected ranges of sequences such as 101-150,200-210")
        ranges.append((int(first), int(last or first)))
    return tuple(ranges)


def nanoseconds(text: str) -> int:
    """Parse a time: milliseconds since 1970, or ISO 8601 with a zone; return nanoseconds since 1970."""
    if text.strip().isdecimal():
        return int(text) * _MILLISECOND
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise ValueError('expected milliseconds since 1970, or a time with its zone such as "2026-11-21T15:00:00Z"')
    since = moment - datetime.fromisoformat("1970-01-01T00:00:00Z")
    return (since.days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1_000
