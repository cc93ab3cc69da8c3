"""The sub-command ``schedules``: moves scheduled jobs that are due to their queues."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

from airflow_provider_jetstream.command.connection_options import connection_options
from airflow_provider_jetstream.command.exit_codes import ExitCode
from airflow_provider_jetstream.command.output_options import output_options
from airflow_provider_jetstream.command.queue_argument import add_queue_argument, opened, read_queue

if TYPE_CHECKING:
    import argparse

    from airflow_provider_jetstream.command.output import Output

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def add_schedule_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    group = commands.add_parser("schedules", help="move scheduled jobs to their queues once they are due")
    actions = group.add_subparsers(dest="action", required=True, metavar="ACTION")
    run = actions.add_parser(
        "run",
        parents=[connection_options(), output_options()],
        help="move jobs that are due, until it is told to stop",
        description="Without it, scheduled jobs stay where they are. Several processes share the jobs of a queue.",
    )
    run.set_defaults(run=_move)
    add_queue_argument(run, several=True)


async def _move(options: argparse.Namespace, out: Output) -> ExitCode:
    from airflow_provider_jetstream.jetstream.mover import move_due_jobs

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in _SIGNALS:
        # Not in a thread that isn't the process's first, and not on every platform.
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, stop.set)
    async with opened(options, out) as connection:
        queues = [await read_queue(connection, source) for source in options.queue]
        out.note(f"moves jobs that are due to {', '.join(queue.name for queue in queues)}")
        try:
            async with asyncio.TaskGroup() as group:
                movers = [group.create_task(move_due_jobs(connection, queue, stop=stop)) for queue in queues]
        except BaseExceptionGroup as errors:
            # The first one's has cancelled the others.
            raise errors.exceptions[0] from None
    moved = {queue.name: mover.result() for queue, mover in zip(queues, movers, strict=True)}
    if out.as_json:
        out.document([{"queue": name, "moved": count} for name, count in moved.items()])
    else:
        for name, count in moved.items():
            out.text(f"{name}: {count} jobs moved")
    return ExitCode.DONE
