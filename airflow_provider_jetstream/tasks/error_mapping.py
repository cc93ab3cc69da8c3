"""How errors of the ground floor end a task: what can't succeed later isn't tried again."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from airflow.providers.common.compat.sdk import AirflowFailException

from airflow_provider_jetstream.jetstream.errors import TerminalError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def terminal_errors_fail() -> Iterator[None]:
    """Turn terminal errors into failures that Airflow doesn't retry; transient ones pass through.

    :raises AirflowFailException: in place of a :class:`~airflow_provider_jetstream.jetstream.TerminalError`
    """
    try:
        yield
    except TerminalError as error:
        raise AirflowFailException(f"{error.code} {error}") from error
