"""The command ``jetstream-worker``."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.settings import VARIABLES
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.jetstream.units import parse_seconds
from airflow_provider_jetstream.worker.errors import HandlerNotFoundError, WorkerStuckError
from airflow_provider_jetstream.worker.logs import LOG_FORMATS, configure_logging
from airflow_provider_jetstream.worker.worker import DEADLINE, PRIORITIES, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_CANT_RUN = 2
_STUCK = 3
_MAX_PORT = 65_535


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a worker until SIGTERM or SIGINT.

    :param arguments: the command line without the program's name; by default that of the process
    :return: the exit status: 0 after a clean stop, 1 if ``conform`` finds a broken line of the contract, 2 if the
        worker can't start or continue, 3 if too many handlers hang and another process has to take over
    """
    options = _parser().parse_args(arguments)
    try:
        if options.command == "conform":
            from airflow_provider_jetstream.worker.conformance.conform import run_conform

            return asyncio.run(run_conform(options))
        configure_logging(options.log_format)
        asyncio.run(_run(options))
    except WorkerStuckError as error:
        print(f"jetstream-worker: {error}", file=sys.stderr)
        return _STUCK
    except JetStreamProviderError as error:
        print(f"jetstream-worker: {error}", file=sys.stderr)
        return _CANT_RUN
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jetstream-worker",
        description="Runs the jobs of a JetStream work queue. The connection comes from"
        f" {', '.join(f'NATS_{suffix}' for suffix in VARIABLES.values())}, or from the context of the command nats that"
        " NATS_CONTEXT names.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run jobs until SIGTERM")
    run.add_argument("--queue", required=True, help="path of the queue's YAML file")
    run.add_argument("--consumer", required=True, help="one of the queue's consumers")
    run.add_argument(
        "--fallback",
        type=_fallback,
        action="append",
        default=[],
        metavar="[FILE:]CONSUMER",
        help="runs its jobs when the consumers named before have none; may be given several times",
    )
    run.add_argument(
        "--priorities",
        choices=PRIORITIES,
        default=PRIORITIES[0],
        help="fair: one job in ten is of a fallback that has any; strict: none is while a consumer before it has jobs",
    )
    run.add_argument("--handler", required=True, help="package.module:function")
    run.add_argument("--concurrency", type=_positive_int, default=1, help="jobs at a time")
    run.add_argument("--batch", type=_positive_int, default=None, help="the handler takes a list of up to so many jobs")
    run.add_argument("--id", default=None, help="identifies the worker in logs and completions")
    run.add_argument(
        "--deadline",
        type=_deadline,
        default=DEADLINE,
        help='time for one attempt, such as "5m", or "none"; one hour where absent',
    )
    run.add_argument("--grace", type=_seconds, default=30.0, help="seconds for running jobs to finish after SIGTERM")
    run.add_argument("--processes", action="store_true", help="run the handler in processes, for CPU-bound work")
    run.add_argument(
        "--log-format", choices=LOG_FORMATS, default=LOG_FORMATS[0], help="text, or one JSON object a line"
    )
    run.add_argument("--metrics-port", type=_port, default=None, help="port on which to serve metrics for Prometheus")
    run.add_argument("--metrics-address", default="0.0.0.0", help="on which address; all where absent")  # noqa: S104
    conform = commands.add_parser("conform", help="try a worker in any language against docs/worker-contract.md")
    conform.add_argument("--limit", type=_seconds, default=120.0, help="seconds for a trial; five run at once")
    conform.add_argument("--json", action="store_true", help="print the lines as JSON")
    conform.add_argument("worker_command", nargs="+", metavar="COMMAND", help="the worker's, behind --")
    return parser


async def _run(options: argparse.Namespace) -> None:
    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings

    worker = Worker(
        options.queue,
        options.consumer,
        _load_handler(options.handler),
        ConnectionSettings.from_environment(os.environ),
        fallbacks=options.fallback,
        priorities=options.priorities,
        concurrency=options.concurrency,
        name=options.id,
        grace=options.grace,
        deadline=options.deadline,
        processes=options.processes,
        batch=options.batch,
        metrics_port=options.metrics_port,
        metrics_address=options.metrics_address,
    )
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, worker.stop)
    await worker.run()


def _load_handler(path: str) -> Callable[..., Any]:
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


def _fallback(text: str) -> str | tuple[str, str]:
    queue, separator, consumer = text.partition(":")
    if not separator and queue:
        return queue
    if not queue or not consumer:
        raise argparse.ArgumentTypeError(
            f"expected a consumer of the queue, or the path of another queue's YAML file and its consumer with a colon"
            f" between them, found {text!r}"
        )
    return queue, consumer


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _deadline(text: str) -> float | None:
    if text == "none":
        return None
    if not (seconds := _seconds(text)):
        raise argparse.ArgumentTypeError(f'expected a time above 0, such as 5m, or "none", found {text!r}')
    return seconds


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > _MAX_PORT:
        raise argparse.ArgumentTypeError(f"expected a port from 0 (any) to {_MAX_PORT}, found {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
