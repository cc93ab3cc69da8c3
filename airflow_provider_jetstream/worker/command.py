"""The command ``jetstream-worker``."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.connection import ConnectionSettings
from airflow_provider_jetstream.jetstream.errors import HandlerNotFoundError, JetStreamProviderError
from airflow_provider_jetstream.worker.runtime import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_CANT_START = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a worker until SIGTERM or SIGINT.

    :param arguments: the command line without the program's name; the process's own where absent
    :return: the exit status: 0 after a clean stop, 2 if the worker can't start
    """
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        asyncio.run(_run(options))
    except JetStreamProviderError as error:
        print(f"jetstream-worker: {error}", file=sys.stderr)
        return _CANT_START
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jetstream-worker",
        description="Does the jobs of a JetStream work queue. The connection comes from NATS_URL, NATS_USER,"
        " NATS_PASSWORD, NATS_TOKEN and NATS_CA.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="take jobs until SIGTERM")
    run.add_argument("--queue", required=True, help="path of the queue's YAML file")
    run.add_argument("--consumer", required=True, help="one of the queue's consumers")
    run.add_argument("--handler", required=True, help="package.module:function")
    run.add_argument("--concurrency", type=_positive, default=1, help="jobs at a time")
    run.add_argument("--id", default=None, help="tells workers apart in logs")
    run.add_argument("--grace", type=float, default=30.0, help="seconds for running jobs to finish after SIGTERM")
    return parser


async def _run(options: argparse.Namespace) -> None:
    worker = Worker(
        options.queue,
        options.consumer,
        _load(options.handler),
        ConnectionSettings.from_environment(os.environ),
        concurrency=options.concurrency,
        name=options.id,
        grace=options.grace,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    await worker.run()


def _load(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    if not module or not name or module.startswith("."):
        raise HandlerNotFoundError(f"expected a handler as package.module:function, found {path!r}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        handler = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise HandlerNotFoundError(f"expected a handler at {path}, found none: {error}") from None
    if not callable(handler):
        raise HandlerNotFoundError(f"expected a function at {path}, found {type(handler).__name__}")
    return handler  # type: ignore[no-any-return]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
