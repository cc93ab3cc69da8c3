"""What a task is told about an error: this package's own where it is one, also from within an executor."""

from __future__ import annotations

import importlib
import logging
import re
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, TerminalError
from airflow_provider_jetstream.spark.application.messages import CODE, ERROR, TERMINAL

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

# As Python ends a traceback, and as Spark hands it on from an executor.
_OWN = re.compile(r"^(?:.*: )?(airflow_provider_jetstream(?:\.\w+)*\.errors)\.(\w+Error): (.+)$", re.MULTILINE)
_LONGEST = 2_000


def error_message(error: BaseException) -> dict[str, Any]:
    """Describe an error.

    :param error: what ended the work
    :return: the message for the task
    """
    for each in _chain(error):
        if isinstance(each, JetStreamProviderError):
            return _message(type(each), str(each))
    for each in _chain(error):
        if (found := _OWN.findall(_text(each))) and (kind := _kind(*found[-1][:2])):
            return _message(kind, found[-1][2])
    return {ERROR: f"{type(error).__name__}: {_text(error)}"[:_LONGEST], CODE: "", TERMINAL: False}


def _message(kind: type[JetStreamProviderError], text: str) -> dict[str, Any]:
    return {ERROR: text, CODE: kind.code, TERMINAL: issubclass(kind, TerminalError)}


def _kind(module: str, name: str) -> type[JetStreamProviderError] | None:
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return found if isinstance(found, type) and issubclass(found, JetStreamProviderError) else None


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        log.debug("An error can't tell its text", exc_info=True)
        return "its JVM is gone"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
