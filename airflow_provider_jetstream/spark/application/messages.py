"""What an application tells the task that started it: a JSON object a line, on a pipe of their own."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

LOG, LEVEL = "log", "level"
RESULT = "result"
ERROR, CODE, TERMINAL = "error", "code", "terminal"


class Messages:
    """The way back to the task.

    :param descriptor: the pipe's file descriptor
    """

    def __init__(self, descriptor: int) -> None:
        self._pipe = os.fdopen(descriptor, "w", encoding="utf-8")
        self._lock = threading.Lock()

    @classmethod
    def instead_of_output(cls) -> Self:
        """Take the standard output for it; what is printed, by the JVM too, goes to the standard error from now on.

        :return: the way back
        """
        sys.stdout.flush()
        # Not handed on to the JVM, as the original would be.
        descriptor = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        return cls(descriptor)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one.

        :param message: what JSON can hold
        """
        line = json.dumps(message)
        with self._lock:
            self._pipe.write(f"{line}\n")
            self._pipe.flush()


class MessageHandler(logging.Handler):
    """Hands log records to the task.

    :param messages: the way back to it
    """

    def __init__(self, messages: Messages) -> None:
        super().__init__()
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record.

        :param record: the record
        """
        try:
            self._messages.send({LOG: self.format(record), LEVEL: record.levelno})
        except (OSError, ValueError):
            self.handleError(record)
