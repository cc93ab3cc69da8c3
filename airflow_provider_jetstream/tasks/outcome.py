"""The outcome of a task: what it returns, and which errors Airflow doesn't retry."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.airflow_compat import AirflowFailException
from airflow_provider_jetstream.jetstream.errors import TerminalError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@contextmanager
def fail_on_terminal_errors() -> Iterator[None]:
    """Turn terminal errors into failures that Airflow doesn't retry; transient ones pass through.

    :raises AirflowFailException: in place of a :class:`~airflow_provider_jetstream.jetstream.TerminalError`
    """
    try:
        yield
    except TerminalError as error:
        raise AirflowFailException(f"{error.code} {error}") from error


def json_result(result: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a result to JSON's types: lists for tuples, text for keys.

    Airflow distinguishes a tuple from a list and shows it as an object with a class name, but only where the result
    wasn't part of a trigger's event. So converted, it is the same whether the task was deferred or not.
    """
    values: dict[str, Any] = json.loads(json.dumps(result))
    return values
