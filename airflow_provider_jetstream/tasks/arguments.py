"""Arguments of operators, sensors, triggers and the hook: checked when a DAG is parsed, and parsed when its task runs.

A wrong value fails the parsing, not the first run weeks later. Templates and results of other tasks are left to the
task, where a template has often made text of a value. Nothing here needs a server or a running task.
"""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from math import isfinite
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from airflow_provider_jetstream.jetstream.errors import (
    ArgumentError,
    JetStreamProviderError,
    JobError,
    RedriveRequestError,
    SelectionError,
)
from airflow_provider_jetstream.jetstream.function_problem import function_problem
from airflow_provider_jetstream.jetstream.publishing.job import Job
from airflow_provider_jetstream.jetstream.units import parse_seconds
from airflow_provider_jetstream.jetstream.waiting.policy import FAIL, RECONCILE_SECONDS, StallPolicy, WaitPolicy
from airflow_provider_jetstream.tasks import runtime

if TYPE_CHECKING:
    from collections.abc import Collection

    from airflow.sdk import BaseOperator

    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection

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
    return runtime.Selection.of(fields)


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


def selection_as_written(select: object) -> Any:
    """Return a selection as its JSON, for a template field; a dict, a template and the like as they are."""
    if select is None or isinstance(select, str | Mapping) or not isinstance(select, runtime.Selection):
        return select
    return selection_as_json(select)


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
    if isinstance(select, runtime.Selection):
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


DEFAULT_CONN_ID: Final = "nats_default"
DEFAULT_WAIT: Final = timedelta(days=1)
DEFAULT_RECONCILE: Final = timedelta(seconds=RECONCILE_SECONDS)

_TOLERATED = ("max_dead", "max_cancelled", "max_unaccounted")
_LEAST = dict.fromkeys(_TOLERATED, 0) | {"min_completed": 1}
WAIT_FIELDS: Final = (*_LEAST, "wait_timeout", "reconcile", "on_stall")
# Those of an operator that waits.
WAIT_ARGUMENTS: Final = (*WAIT_FIELDS, "defer_after")
_WHERE_ABSENT: Mapping[str, object] = {
    **dict.fromkeys(_TOLERATED, 0),
    **dict.fromkeys(("min_completed", "defer_after")),
    "wait_timeout": DEFAULT_WAIT,
    "reconcile": DEFAULT_RECONCILE,
    "on_stall": FAIL,
    **dict.fromkeys(("cancel_on_kill", "cancel_on_failure"), False),
}


class WaitLimits(NamedTuple):
    """The limits of a wait, parsed."""

    policy: WaitPolicy
    stalls: StallPolicy
    timeout: timedelta


def parse_wait_limits(values: Mapping[str, Any], numbers: Collection[str] = ()) -> WaitLimits:
    """Parse the limits of a wait.

    :param values: the arguments :data:`WAIT_FIELDS` by name; numbers of ends are ``None`` for any number
    :param numbers: the arguments for which the DAG's author wrote something else than ``None``: a template of them that
        renders to nothing is refused, as it would tolerate any number
    :raises ArgumentError: one can't be used
    """
    counts = {
        name: None if values[name] is None and name not in numbers else parse_count(name, values[name], least)
        for name, least in _LEAST.items()
    }
    reconcile, timeout = (parse_span(name, values[name], above_zero=True) for name in ("reconcile", "wait_timeout"))
    return WaitLimits(WaitPolicy(**counts), StallPolicy(reconcile.total_seconds(), values["on_stall"]), timeout)


def check_wait_limits(values: Mapping[str, Any]) -> None:
    """Refuse limits of a wait that can't be used; leave templates to the task.

    :param values: the arguments :data:`WAIT_FIELDS` by name
    :raises ArgumentError: one can't be used, or they exclude each other
    """
    if values["min_completed"] is not None and any(values[name] != 0 for name in _TOLERATED):
        raise ArgumentError(
            "expected min_completed alone, found it with max_dead, max_cancelled or max_unaccounted: how the other jobs"
            " end doesn't matter then; leave those out"
        )
    parse_wait_limits({name: _WHERE_ABSENT[name] if is_templated(value) else value for name, value in values.items()})


def refuse_limits_without_wait(values: Mapping[str, Any]) -> None:
    """Refuse limits of a wait that doesn't take place.

    :param values: arguments by name
    :raises ArgumentError: one is set
    """
    if found := [name for name, value in values.items() if value != _WHERE_ABSENT[name]]:
        raise ArgumentError(
            f"expected {', '.join(found)} with wait_for_completion=True only, found it without: nothing waits for the"
            " jobs, so that it would mean nothing; add wait_for_completion=True, or leave it out"
        )


# Stands for what each instance gets by itself.
_MAPPED = "{{ mapped }}"


def check_shared_arguments(operator: type[BaseOperator], arguments: Mapping[str, Any], required: Iterable[str]) -> None:
    """Refuse wrong arguments of ``partial``, which Airflow gives to no constructor before a task runs.

    :param required: the arguments that the operator can't do without
    :raises JetStreamProviderError: an argument can't be used, or not together with the others
    """
    operator(**dict.fromkeys(required, _MAPPED) | dict(arguments) | {"_airflow_from_mapped": True})


def check_text(**values: object) -> None:
    """Refuse what is no text, or is empty.

    :param values: by the names of the arguments
    :raises ArgumentError: one is none
    """
    for name, value in values.items():
        if not is_templated(value) and not (isinstance(value, str) and value.strip()):
            raise ArgumentError(f"expected text as {name}, found {value!r}: correct it")


def check_optional_text(**values: object) -> None:
    """Refuse what is neither text nor ``None``; empty text counts as absent.

    :param values: by the names of the arguments
    :raises ArgumentError: one is neither
    """
    for name, value in values.items():
        if value is not None and not isinstance(value, str) and not is_templated(value):
            raise ArgumentError(f"expected text as {name}, found {value!r}: correct it, or leave it out")


def check_flags(**values: object) -> None:
    """Refuse what is neither ``True`` nor ``False``: the text ``"false"`` would be true.

    :param values: by the names of the arguments
    :raises ArgumentError: one is neither
    """
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ArgumentError(f"expected True or False as {name}, which takes no template, found {value!r}")


def check_mapping(**values: object) -> None:
    """Refuse what is no mapping.

    :param values: by the names of the arguments
    :raises ArgumentError: one is none
    """
    for name, value in values.items():
        if not isinstance(value, Mapping):
            raise ArgumentError(f"expected a dict as {name}, found {value!r}: correct it")


def check_positive_seconds(**values: object) -> None:
    """Refuse what is no number of seconds above 0.

    :param values: by the names of the arguments
    :raises ArgumentError: one is none
    """
    for name, value in values.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise ArgumentError(f"expected a number of seconds above 0 as {name}, found {value!r}: correct it")


def check_times(**values: object) -> None:
    """Refuse what is no time in seconds since the epoch.

    :param values: by the names of the arguments
    :raises ArgumentError: one is none
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise ArgumentError(f"expected seconds since the epoch as {name}, found {value!r}: correct it")


def check_function(
    name: str, function: Any, parameter: str, error: type[JetStreamProviderError] = ArgumentError
) -> None:
    """Refuse what can't be called with one value, or returns a coroutine that nothing would await.

    :param name: the argument's
    :param function: ``None`` where it is absent
    :param parameter: what the function gets
    :param error: what is raised
    """
    if problem := function_problem(name, function, parameter):
        raise error(problem)


def dicts_as_texts(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of a watcher's trigger with their dicts as JSON texts.

    Airflow 3.2 writes the keys of its own encoding of a dict as ``Encoding.TYPE`` and ``Encoding.VAR`` when it stores
    the trigger of an ``AssetWatcher``, and hands that to the trigger in place of the dict (seen with 3.2.2; 3.1.8 and
    3.3.2 hand the dict on). A triggerer whose trigger refuses it ends. Texts, numbers and lists of texts stay as they
    are.
    """
    return {name: json.dumps(value) if isinstance(value, dict) else value for name, value in arguments.items()}


def dict_of_text(argument: Any) -> Any:
    """Return the dict that an argument is the JSON text of, or the argument itself where it is none."""
    # A path doesn't begin like that.
    if not isinstance(argument, str) or not argument.startswith("{"):
        return argument
    try:
        return json.loads(argument)
    except (ValueError, RecursionError):
        return argument
