"""Real workers of this package, each in a process."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from airflow_provider_jetstream.dev.process import Process


def start_worker(
    name: str,
    *,
    queue: Path,
    consumer: str,
    handler: str,
    env: Mapping[str, str],
    logs: Path,
    concurrency: int = 1,
    fallbacks: Sequence[str] = (),
) -> Process:
    """Start ``jetstream-worker run`` with this id and, named after it, a log file; ``env`` is its whole environment."""
    command = [
        *(sys.executable, "-m", "airflow_provider_jetstream.worker.cli", "run"),
        *("--queue", str(queue), "--consumer", consumer, "--handler", handler),
        *("--concurrency", str(concurrency), "--id", name),
        *(argument for fallback in fallbacks for argument in ("--fallback", fallback)),
    ]
    return Process.start(command, env=env, log_file=logs / f"{name}.log")
