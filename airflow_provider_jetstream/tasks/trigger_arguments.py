"""Checks of the arguments of the trigger that waits for jobs: what it can't use would fail it after it has waited."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Any

from airflow_provider_jetstream.jetstream.errors import ArgumentError
from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
from airflow_provider_jetstream.jetstream.waiting.policy import WaitPolicy
from airflow_provider_jetstream.tasks.arguments import check_mapping

_EXPECTED = {Cursor: "a cursor as a dict as mark", WaitPolicy: "the arguments of a WaitPolicy as tolerance"}


def check_wait_arguments(mark: Any, tolerance: Any, sequences: object, summary: object) -> None:
    """Refuse what names no jobs, or no place to read their ends from.

    :raises ArgumentError: an argument can't be used
    """
    check_mapping(mark=mark, tolerance=tolerance, summary=summary)
    for kind, fields in ((Cursor, mark), (WaitPolicy, tolerance)):
        try:
            kind(**fields)
        except TypeError as error:
            raise ArgumentError(f"expected {_EXPECTED[kind]}, found {fields!r}: {error}") from None
    if isinstance(sequences, str) or not isinstance(sequences, Iterable) or not all(map(_is_range, sequences)):
        raise ArgumentError(
            f"expected pairs of first and last stream sequence, such as [[3, 5]], as sequences, found {sequences!r}"
        )


def check_times(**values: object) -> None:
    """Refuse what is no time in seconds since the epoch.

    :param values: by the names of the arguments
    :raises ArgumentError: one is none
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise ArgumentError(f"expected seconds since the epoch as {name}, found {value!r}: correct it")


def _is_range(span: object) -> bool:
    if not isinstance(span, list | tuple) or len(span) != 2:  # noqa: PLR2004 - first and last
        return False
    first, last = span
    return isinstance(first, int) and isinstance(last, int) and 0 < first <= last
