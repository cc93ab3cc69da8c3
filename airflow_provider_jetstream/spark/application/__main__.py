"""The application's process: reads an assignment from its standard input, runs it, and ends when the input closes.

The operating system closes the input when the Airflow task is killed, so that no signal handler of the task has to run
for everything that it started to end.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.spark.application.messages import RESULT, MessageHandler, MessagePipe, error_message

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

# Shorter than the five seconds that Airflow leaves a task between SIGTERM and SIGKILL.
_GRACE_SECONDS = 4.0

_end_requested = threading.Event()


def main() -> int:
    """Run the assignment, send its result or error to the task, and return the exit status."""
    messages = MessagePipe.replacing_stdout()
    handler = MessageHandler(messages)
    logging.basicConfig(handlers=[handler], level=logging.WARNING, format="%(message)s")
    logging.getLogger("airflow_provider_jetstream").setLevel(logging.INFO)
    assignment = json.loads(_read_line())
    _end_with_input()
    try:
        from airflow_provider_jetstream.spark.application.session import logged_stages, running_session

        with (
            running_session(assignment["name"], assignment["master"], assignment["conf"]) as session,
            logged_stages(session.sparkContext),
        ):
            outcome = _run_command(session, assignment)
    except Exception as error:
        log.debug("Spark didn't start, or didn't stop", exc_info=True)
        outcome = error_message(error)
    messages.send(outcome)
    return 0 if RESULT in outcome else 1


def _run_command(session: SparkSession, assignment: Mapping[str, Any]) -> dict[str, Any]:
    from pyspark import cloudpickle

    from airflow_provider_jetstream.spark.application.commands import COMMANDS

    try:
        function = assignment["function"] and cloudpickle.loads(base64.b64decode(assignment["function"]))
        command = COMMANDS[assignment["command"]]
        return {RESULT: command(session, assignment["connection"], assignment["arguments"], function)}
    except Exception as error:
        log.debug("The command failed", exc_info=True)
        # Here, since PySpark's errors read their text from the JVM.
        return error_message(error)


def _read_line() -> bytes:
    """Read a line of the standard input, and nothing beyond it."""
    line = b""
    while not line.endswith(b"\n"):
        if not (chunk := os.read(sys.stdin.fileno(), 65536)):
            sys.exit("expected an assignment on the standard input, found its end")
        line += chunk
    return line


def _end_with_input() -> None:
    """From now on, end this process and its group when the standard input ends or SIGTERM comes.

    The process must be the leader of a group, and nothing else may read the standard input.
    """
    signal.signal(signal.SIGTERM, lambda *_: _end_requested.set())
    threading.Thread(target=_watch_input, daemon=True).start()
    threading.Thread(target=_end_group, daemon=True).start()


def _watch_input() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    _end_requested.set()


def _end_group() -> None:
    _end_requested.wait()
    # In this time the JVM leaves the cluster, finishes its event log and deletes its files.
    os.killpg(os.getpgrp(), signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
