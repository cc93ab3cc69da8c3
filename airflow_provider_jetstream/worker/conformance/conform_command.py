"""The command ``jetstream-worker conform``."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
from airflow_provider_jetstream.worker.conformance.conform import conform

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from airflow_provider_jetstream.worker.conformance.lines import Line

_BROKEN: Final = 1
_INTERRUPTED: Final = 130


async def run_conform(options: argparse.Namespace) -> int:
    """Run the trials, print each line, and return the exit status: 1 where the worker breaks one.

    SIGINT and SIGTERM end the trials, whose workers and queues are removed then.
    """
    if task := asyncio.current_task():
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    folder = Path(tempfile.mkdtemp(prefix="conform-"))
    try:
        lines = await conform(
            ConnectionSettings.from_environment(os.environ), options.worker_command, folder, options.limit
        )
    except asyncio.CancelledError:
        shutil.rmtree(folder, ignore_errors=True)
        print("jetstream-worker: interrupted; the queues of the trials are removed", file=sys.stderr)
        return _INTERRUPTED
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    broken = sum(bool(line.problem) for line in lines)
    print(_json(lines) if options.json else _text(lines))
    if not broken:
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    print(f"What the workers printed is in {folder}", file=sys.stderr)
    return _BROKEN


def _json(lines: Sequence[Line]) -> str:
    return json.dumps(
        [{"line": line.name, "text": line.text, "problem": line.problem or None} for line in lines], indent=2
    )


def _text(lines: Sequence[Line]) -> str:
    width = max(len(line.name) for line in lines)
    rows = [
        f"{'BROKEN' if line.problem else 'kept':6}  {line.name:{width}}  {line.problem or line.text}" for line in lines
    ]
    kept = sum(not line.problem for line in lines)
    return "\n".join([*rows, f"{kept} of {len(lines)} lines kept"])
