"""Ending with the task: when the pipe that leads from it closes, for whatever reason, everything that was started ends.

The operating system closes it when the task is killed, so that no signal handler of the task has to run for that.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

# Shorter than the five seconds that Airflow leaves a task between SIGTERM and SIGKILL.
_GRACE_SECONDS = 4.0

_ended = threading.Event()


def end_with_input() -> None:
    """From now on, end this process and its group when the standard input ends, or when it is told to.

    It has to be the leader of a group, and nobody else may read the standard input.
    """
    signal.signal(signal.SIGTERM, lambda *_: _ended.set())
    threading.Thread(target=_watch_input, daemon=True).start()
    threading.Thread(target=_end_group, daemon=True).start()


def read_line() -> bytes:
    """Read a line of the standard input, and nothing beyond it.

    :return: the line
    """
    line = b""
    while not line.endswith(b"\n"):
        if not (part := os.read(sys.stdin.fileno(), 65536)):
            sys.exit("expected an assignment on the standard input, found its end")
        line += part
    return line


def _watch_input() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    _ended.set()


def _end_group() -> None:
    _ended.wait()
    # The JVM says goodbye to the cluster, finishes its event log and deletes its files, if it gets to it.
    os.killpg(os.getpgrp(), signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    os.killpg(os.getpgrp(), signal.SIGKILL)
