"""Real workers of this package, each a process of its own."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from testbed.processes import Process


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
    """
    Start ``jetstream-worker run``.

    :param name: the worker's id, and the name of its log file
    :param queue: the queue's YAML file
    :param consumer: one of the queue's consumers
    :param handler: ``package.module:function``
    :param env: its whole environment, ``NATS_URL`` among it
    :param logs: the folder of its log file
    :param concurrency: jobs at a time
    :param fallbacks: whose jobs it takes when the consumer has none
    """
    command = [
        *(sys.executable, "-m", "airflow_provider_jetstream.worker.cli", "run"),
        *("--queue", str(queue), "--consumer", consumer, "--handler", handler),
        *("--concurrency", str(concurrency), "--id", name),
        *(argument for each in fallbacks for argument in ("--fallback", each)),
    ]
    return Process.start(command, env=env, log_file=logs / f"{name}.log")
