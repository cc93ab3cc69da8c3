"""Starts a Spark driver in a process of its own, and exchanges messages with it, a line each."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def driver_process(script: str, *arguments: str, log: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a program of this folder until the block ends."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    with log.open("w") as errors:
        driver = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1
        )
        try:
            yield driver
        finally:
            driver.kill()
            driver.wait()


def read_message(driver: subprocess.Popen[str]) -> Any:
    """Wait for the driver's next message."""
    assert driver.stdout is not None
    while line := driver.stdout.readline():
        if line.startswith("{"):
            return json.loads(line)
    raise AssertionError("the driver ended")


def resume(driver: subprocess.Popen[str]) -> None:
    """Let the driver continue."""
    assert driver.stdin is not None
    driver.stdin.write("\n")
    driver.stdin.flush()
