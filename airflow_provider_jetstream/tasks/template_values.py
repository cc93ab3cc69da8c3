"""Values as they arrive in a task: written in a DAG, or rendered from a template, which often makes text of them."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import RedriveRequestError, SelectionError

_Number = TypeVar("_Number", int, float)

_NOTHING = ("", "None", "null")
_SPAN = 2


def templated(value: object) -> bool:
    """Tell whether a value will only be known when the task runs.

    :param value: what an operator was given
    :return: whether it is a template or another task's result, or holds one
    """
    if isinstance(value, str):
        return "{{" in value or "{%" in value
    if isinstance(value, Mapping):
        return any(templated(part) for part in (*value, *value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return any(templated(part) for part in value)
    return hasattr(value, "resolve")


def absent(value: object) -> bool:
    """Tell whether a value is nothing, or the text that a template makes of nothing.

    :param value: the value
    :return: whether it is
    """
    return value is None or (isinstance(value, str) and value.strip() in _NOTHING)


def require_rendered(name: str, value: object) -> None:
    """Refuse a choice of dead letters that vanished in templating.

    :param name: what it is for
    :param value: what its template rendered to
    :raises SelectionError: that is nothing
    """
    if absent(value):
        raise SelectionError(
            f"expected {name} to say which dead letters are meant, found that its template rendered to nothing, which"
            " would mean all of them: see why, or leave it out"
        )


def number(name: str, value: object, kind: type[_Number]) -> _Number | None:
    """Read a number.

    :param name: what it is for
    :param value: the number or its text
    :param kind: ``int`` or ``float``
    :return: the number, if there is one
    :raises RedriveOrderError: it is none
    """
    if absent(value):
        return None
    found: _Number | None = None
    with suppress(ValueError, OverflowError):
        found = kind(float(str(value)))
    if found is None or found != float(str(value)):
        wanted = "a whole number" if kind is int else "a number"
        raise RedriveRequestError(f"expected {wanted} for {name}, found {value!r}")
    return found


def text(value: object) -> str | None:
    """Read a text.

    :param value: the text
    :return: the text, if there is one
    """
    return None if absent(value) else str(value)


def selection_of(select: object, sequences: object = None) -> Selection:
    """Read a selection of dead letters.

    What renders to nothing is refused rather than left out, since that would select more than was meant.

    :param select: a selection, its dict, or the text of one; ``None`` for every dead letter in circulation
    :param sequences: stream sequences for it, as numbers or as pairs of first and last, or the text of such a list
    :return: the selection
    :raises SelectionError: it isn't understood
    """
    fields = _fields(select)
    for name, value in fields.items():
        if absent(value):
            raise SelectionError(
                f"expected a value to select {name} by, found {value!r}: leave {name} out to select any"
            )
    if sequences is not None:
        if "sequences" in fields:
            raise SelectionError("expected sequences in one place, found them in select and as an argument")
        fields["sequences"] = sequences
    if "sequences" in fields:
        fields["sequences"] = list(_sequences(fields["sequences"]))
    if isinstance(reasons := fields.get("reasons"), str):
        fields["reasons"] = _literal(reasons) if reasons.lstrip().startswith(("[", "(", "{")) else [reasons]
    return Selection.of(fields)


def selection_as_json(selection: Selection) -> dict[str, Any]:
    """Write a selection down for a template field or a trigger.

    :param selection: the selection
    :return: what differs from every dead letter in circulation; the same text each time
    """
    written = selection.model_dump(mode="json", exclude_defaults=True)
    return {name: sorted(value) if isinstance(value, list) else value for name, value in written.items()}


def _fields(select: object) -> dict[str, Any]:
    if select is None:
        return {}
    if isinstance(select, Selection):
        return selection_as_json(select)
    found = _literal(select) if isinstance(select, str) else select
    if not isinstance(found, Mapping):
        raise SelectionError(
            f'expected a selection of dead letters such as {{"error_class": "app.BusyError"}}, found {select!r}'
        )
    return {str(name): value for name, value in found.items()}


def _sequences(given: object) -> Iterable[int]:
    found = _literal(given) if isinstance(given, str) else given
    if isinstance(found, int):
        found = [found]
    if not isinstance(found, Iterable) or isinstance(found, Mapping | str):
        raise _no_sequences(given)
    for part in found:
        span = list(part) if isinstance(part, list | tuple) else [part, part]
        try:
            first, last = (int(str(end)) for end in span)
        except ValueError:
            raise _no_sequences(part) from None
        if not 0 < first <= last:
            raise _no_sequences(part)
        yield from range(first, last + 1)


def _no_sequences(found: object) -> SelectionError:
    return SelectionError(
        f"expected stream sequences such as [3, 5], or pairs of first and last such as [[3, 5]], found {found!r}"
    )


def _literal(written: str) -> Any:
    try:
        return json.loads(written)
    except ValueError:
        pass
    try:
        return ast.literal_eval(written.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return written
