"""Checks of arguments when a DAG is parsed: a wrong value fails the parsing, not the first run weeks later.

Templates and results of other tasks are left to the task.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any

from airflow_provider_jetstream.jetstream.errors import ArgumentError, JetStreamProviderError
from airflow_provider_jetstream.jetstream.function_problem import function_problem
from airflow_provider_jetstream.tasks.template_values import is_templated


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
