"""Arguments as they arrive in a task: written in a DAG, or rendered from a template, which often makes text of them."""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from os import PathLike
from typing import Any, TypeVar

from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import (
    ArgumentError,
    JetStreamProviderError,
    JobError,
    RedriveRequestError,
    SelectionError,
)
from airflow_provider_jetstream.jetstream.publishing.job import Job
from airflow_provider_jetstream.jetstream.units import parse_seconds

_Number = TypeVar("_Number", int, float)

# More don't fit into the memory of a task.
_MOST_SEQUENCES = 10_000_000
# Airflow's own time limits are times of day in years of four digits.
_LONGEST = timedelta(days=3_650)
_RENDERED_NOTHING = ("", "None", "null")


def is_templated(value: object) -> bool:
    """Return whether a value is or holds a template or another task's result, known only when the task runs."""
    if isinstance(value, str):
        return "{{" in value or "{%" in value
    if isinstance(value, Mapping):
        return any(is_templated(item) for item in (*value, *value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return any(is_templated(item) for item in value)
    if isinstance(value, Job):
        return any(is_templated(getattr(value, item.name)) for item in dataclasses.fields(value))
    return hasattr(value, "resolve") and not isinstance(value, PathLike)


def is_absent(value: object) -> bool:
    """Return whether a value is ``None``, or the text that a template makes of ``None``."""
    return value is None or (isinstance(value, str) and value.strip() in _RENDERED_NOTHING)


def require_rendered(name: str, value: object) -> None:
    """Refuse an argument of a redrive or a scan whose template rendered to nothing.

    :raises SelectionError: ``value`` is nothing, and was to choose dead letters
    :raises RedriveRequestError: it is nothing, and was to say where to, or in which order
    """
    if not is_absent(value):
        return
    if name in ("subject", "target_queue", "order_key", "patch", "discard", "undo"):
        raise RedriveRequestError(
            f"expected a value for {name}, found that its template rendered to nothing, which would redrive to another"
            " place, in another order, without a change, or at all: see why, or leave it out"
        )
    raise SelectionError(
        f"expected {name} to select dead letters, found that its template rendered to nothing, which would select"
        " all of them: see why, or leave it out"
    )


def parse_number(
    name: str, value: object, kind: type[_Number], error: type[JetStreamProviderError] = RedriveRequestError
) -> _Number | None:
    """Parse a number or its text; ``None`` where it is absent.

    :param error: what is raised where it is no number of that type
    :raises RedriveRequestError: it is no number of that type
    """
    if is_absent(value):
        return None
    number: _Number | None = None
    with suppress(ValueError, OverflowError):
        number = kind(float(str(value)))
    if isinstance(value, bool) or number is None or number != float(str(value)):
        expected = "a whole number" if kind is int else "a number"
        raise error(f"expected {expected} for {name}, found {value!r}")
    return number


def parse_count(name: str, value: object, least: int = 0) -> int:
    """Parse a whole number or its text.

    :raises ArgumentError: it is none, or too small; also where a template rendered to nothing
    """
    if is_absent(value):
        raise _rendered_nothing("a whole number", name, value)
    number = parse_number(name, value, int, ArgumentError)
    if number is None or number < least:
        raise ArgumentError(f"expected a whole number of at least {least} as {name}, found {value!r}: correct it")
    return number


def parse_span(name: str, value: object, *, above_zero: bool = False) -> timedelta:
    """Parse a duration, or a number of seconds.

    :param above_zero: whether 0 is refused
    :raises ArgumentError: it is neither, or longer than ten years; also where a template rendered to nothing
    """
    if is_absent(value):
        raise _rendered_nothing("a duration", name, value)
    try:
        seconds = parse_seconds(value)
    except ValueError as error:
        raise ArgumentError(f"{name}: {error}") from None
    if seconds > _LONGEST.total_seconds():
        raise ArgumentError(f"expected at most {_LONGEST.days} days as {name}, found {value!r}: choose a shorter time")
    if above_zero and not timedelta(seconds=seconds):
        raise ArgumentError(f"expected a duration above 0 as {name}, found {value!r}: correct it")
    return timedelta(seconds=seconds)


def parse_time_limit(name: str, value: object) -> float:
    """Parse a duration or a number of seconds into seconds; 0 where it is absent.

    :raises JobError: it is neither
    """
    try:
        return 0.0 if is_absent(value) else parse_seconds(value)
    except ValueError as error:
        raise JobError(f"{name}: {error}") from None


def parse_flag(name: str, value: object, error: type[JetStreamProviderError]) -> bool:
    """Parse true or false, or the text that a template makes of it; false where it is absent.

    :param error: what is raised where it is neither
    """
    flags = {"true": True, "false": False}
    if is_absent(value):
        return False
    if (text := str(value).strip().lower()) not in flags:
        raise error(f"expected true or false for {name}, found {value!r}")
    return flags[text]


def parse_text(value: object) -> str | None:
    """Return the text; ``None`` where it is absent."""
    return None if is_absent(value) else str(value)


def parse_list(value: Any) -> Any:
    """Return the list that a template makes the text of; anything else as it is."""
    is_text_of_list = isinstance(value, str) and value.lstrip().startswith(("[", "("))
    return _literal(value) if is_text_of_list else value


def parse_selection(select: object, sequences: object = None) -> Selection:
    """Parse a selection of dead letters.

    A field that renders to nothing is refused rather than left out: without it, more letters than meant would match.

    :param select: a selection, its dict, or the text of one; ``None`` for every dead letter in circulation
    :param sequences: its stream sequences, as numbers or as pairs of first and last, or the text of such a list
    :raises SelectionError: it isn't understood
    """
    fields = _fields(select)
    for name, value in fields.items():
        if is_absent(value):
            raise SelectionError(
                f"expected a value to select {name} by, found {value!r}: leave {name} out to select any"
            )
    if sequences is not None:
        if "sequences" in fields:
            raise SelectionError(
                "expected sequences once, found them in select and as an argument: leave one of the two out"
            )
        fields["sequences"] = sequences
    if "sequences" in fields:
        fields["sequences"] = parse_sequences(fields["sequences"])
    if isinstance(reasons := fields.get("reasons"), str):
        fields["reasons"] = _literal(reasons) if reasons.lstrip().startswith(("[", "(", "{")) else [reasons]
    return Selection.of(fields)


def parse_sequences(value: object) -> list[int]:
    """Parse stream sequences: numbers, or pairs of first and last, or the text of such a list.

    :raises SelectionError: it isn't understood
    """
    return list(_sequences(value))


def parse_job_ids(value: object) -> list[str]:
    """Parse ids of jobs: one, several, or the text of a list of them.

    :raises JobError: they aren't understood
    """
    value = parse_list(value)
    items = [value] if isinstance(value, str | int) else value
    if is_absent(value) or isinstance(items, Mapping | bytes) or not isinstance(items, Iterable):
        raise JobError(f"expected the id of a job, or a list of ids, found {value!r}")
    ids = list(items)
    for position, item in enumerate(ids):
        if not isinstance(item, str | int) or isinstance(item, bool) or not str(item).strip():
            raise JobError(f"expected text or a number as id {position}, found {item!r}: take the ids out of the jobs")
    return [str(item) for item in ids]


def selection_as_json(selection: Selection) -> dict[str, Any]:
    """Return the fields that are set, for a template field or a trigger; equal selections give equal JSON."""
    fields = selection.model_dump(mode="json", exclude_defaults=True)
    return {name: sorted(value) if isinstance(value, list) else value for name, value in fields.items()}


def _rendered_nothing(expected: str, name: str, value: object) -> ArgumentError:
    return ArgumentError(
        f"expected {expected} as {name}, found {value!r}: where it is a template, see why it rendered to nothing"
    )


def _fields(select: object) -> dict[str, Any]:
    if select is None:
        return {}
    if isinstance(select, Selection):
        return selection_as_json(select)
    fields = _literal(select) if isinstance(select, str) else select
    if not isinstance(fields, Mapping):
        raise SelectionError(
            f'expected a selection of dead letters such as {{"error_class": "app.BusyError"}}, found {select!r}'
        )
    return {str(name): value for name, value in fields.items()}


def _sequences(value: object) -> Iterable[int]:
    items = _literal(value) if isinstance(value, str) else value
    if isinstance(items, int):
        items = [items]
    if not isinstance(items, Iterable) or isinstance(items, Mapping | str | bytes):
        raise _no_sequences(value)
    count = 0
    for item in items:
        bounds = list(item) if isinstance(item, list | tuple) else [item, item]
        try:
            first, last = (int(str(bound)) for bound in bounds)
        except ValueError:
            raise _no_sequences(item) from None
        if not 0 < first <= last:
            raise _no_sequences(item)
        count += last - first + 1
        if count > _MOST_SEQUENCES:
            raise SelectionError(
                f"expected at most {_MOST_SEQUENCES:,} stream sequences, found {item!r} among them: name fewer"
            )
        yield from range(first, last + 1)


def _no_sequences(found: object) -> SelectionError:
    return SelectionError(
        f"expected stream sequences such as [3, 5], or pairs of first and last such as [[3, 5]], found {found!r}"
    )


def _literal(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
