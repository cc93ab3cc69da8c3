"""The command ``jetstream-queue``."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from airflow_provider_jetstream import __version__
from airflow_provider_jetstream.command.dev_command import add_dev_command
from airflow_provider_jetstream.command.exit_codes import ExitCode, exit_code_of
from airflow_provider_jetstream.command.exporter_command import add_exporter_command
from airflow_provider_jetstream.command.job_commands import add_job_commands, add_schedule_commands
from airflow_provider_jetstream.command.letter_commands import add_letter_commands
from airflow_provider_jetstream.command.output import Output
from airflow_provider_jetstream.command.queue_commands import add_permission_command, add_queue_commands
from airflow_provider_jetstream.command.redrive_commands import add_redrive_commands
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError

if TYPE_CHECKING:
    from collections.abc import Sequence

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sub-command.

    :param arguments: the command line without the program's name; by default that of the process
    :return: the exit code, see docs/command-line.md
    """
    parser = command_parser()
    with suppress(ImportError):
        import argcomplete

        argcomplete.autocomplete(parser)
    options = parser.parse_args(arguments)
    out = Output(as_json=options.as_json)
    try:
        code: int = asyncio.run(_run(options, out))
        out.flush()
    except BrokenPipeError:
        if not out.is_closed:
            raise
        out.discard()
        return ExitCode.CLOSED_PIPE
    except (KeyboardInterrupt, asyncio.CancelledError):
        out.error("interrupted")
        return ExitCode.INTERRUPTED
    except JetStreamProviderError as error:
        out.error(str(error), error.code)
        return exit_code_of(error)
    return code


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="jetstream-queue", description="Looks after JetStream work queues and their dead letters."
    )
    parser.add_argument("--version", action="version", version=f"jetstream-queue {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_queue_commands(commands)
    add_letter_commands(commands)
    add_redrive_commands(commands)
    add_job_commands(commands)
    add_schedule_commands(commands)
    add_exporter_command(commands)
    add_permission_command(commands)
    add_dev_command(commands)
    return parser


async def _run(options: argparse.Namespace, out: Output) -> int:
    """Run the sub-command; a signal cancels it, so that it closes what it has opened."""
    task = asyncio.ensure_future(options.run(options, out))
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        # Not in a thread that isn't the process's first, and not on every platform.
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, task.cancel)
    return int(await task)


if __name__ == "__main__":
    sys.exit(main())
