"""What an Airflow task needs of an application without importing Spark: its messages, and a check of the installation.

A message is a log record, the result or the error: one JSON object a line.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import sys
import threading
from importlib import metadata
from typing import TYPE_CHECKING, Any, Self

from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, TerminalError
from airflow_provider_jetstream.spark.errors import SparkSettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


LOG, LEVEL = "log", "level"
RESULT = "result"
ERROR, CODE, TERMINAL = "error", "code", "terminal"

log = logging.getLogger(__name__)

# The last line of a Python traceback, as Spark includes it in an error of an executor.
_OWN_ERROR = re.compile(r"^(?:.*: )?(airflow_provider_jetstream(?:\.\w+)*)\.(\w+Error): (.+)$", re.MULTILINE)
_LONGEST_TEXT = 2_000


class MessagePipe:
    """A pipe to the task, by its file descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._pipe = os.fdopen(descriptor, "w", encoding="utf-8")
        self._lock = threading.Lock()

    @classmethod
    def replacing_stdout(cls) -> Self:
        """Use the standard output as the pipe; what is printed, also by the JVM, goes to the standard error instead."""
        sys.stdout.flush()
        # The JVM inherits the original descriptor, but not the duplicate.
        descriptor = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        return cls(descriptor)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message that JSON can hold."""
        line = json.dumps(message)
        with self._lock:
            self._pipe.write(f"{line}\n")
            self._pipe.flush()


class MessageHandler(logging.Handler):
    """Sends log records to the task."""

    def __init__(self, messages: MessagePipe) -> None:
        super().__init__()
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record."""
        try:
            self._messages.send({LOG: self.format(record), LEVEL: record.levelno})
        except (OSError, ValueError):
            self.handleError(record)


def error_message(error: BaseException) -> dict[str, Any]:
    """Describe an error to the task: as this package's own error where its chain contains one, also of an executor."""
    for cause in _chain(error):
        if isinstance(cause, JetStreamProviderError):
            return _message(type(cause), str(cause))
    for cause in _chain(error):
        if (matches := _OWN_ERROR.findall(_text(cause))) and (kind := _error_class(*matches[-1][:2])):
            return _message(kind, matches[-1][2])
    return {ERROR: f"{type(error).__name__}: {_text(error)}"[:_LONGEST_TEXT], CODE: "", TERMINAL: False}


def _message(kind: type[JetStreamProviderError], text: str) -> dict[str, Any]:
    return {ERROR: text, CODE: kind.code, TERMINAL: issubclass(kind, TerminalError)}


def _error_class(module: str, name: str) -> type[JetStreamProviderError] | None:
    try:
        kind = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return kind if isinstance(kind, type) and issubclass(kind, JetStreamProviderError) else None


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        log.debug("The text of an error can't be read", exc_info=True)
        return "its JVM is gone"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


_LOWEST = (4, 1)
# They write into PySpark's own folder: with another version, the files of both are mixed.
_OVERWRITING = ("pyspark-client", "pyspark-connect")


def require_pyspark() -> str:
    """Return the version of PySpark.

    :raises SparkSettingsError: it is missing, too old, or mixed with files of another version
    """
    installed = _version("pyspark")
    if installed is None:
        raise SparkSettingsError(
            "expected pyspark 4.1 or later where this task runs, found none: install airflow-provider-jetstream with"
            " its extra spark (pyspark-client alone contains no Spark that could be started)"
        )
    if tuple(int(part) for part in installed.split(".")[:2]) < _LOWEST:
        raise SparkSettingsError(f"expected pyspark 4.1 or later, found {installed}: upgrade it")
    for other in _OVERWRITING:
        if (version := _version(other)) not in (None, installed):
            raise SparkSettingsError(
                f"expected {other} of the version of pyspark, {installed}, found {version}: it writes into pyspark's"
                " own folder, whose files are now of two versions; uninstall both, then install"
                f" pyspark=={installed} {other}=={installed}, or pyspark alone"
            )
    return installed


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
