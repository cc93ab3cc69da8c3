"""The sub-commands ``jobs`` and ``schedules``: find, cancel, retry or give up jobs; move those that are due."""

from __future__ import annotations

import argparse
import asyncio
import signal
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.command.exit_codes import ExitCode
from airflow_provider_jetstream.command.options import (
    add_queue_argument,
    connection_options,
    opened,
    output_options,
    positive_int,
    read_queue,
    requester_name,
    stream_name,
)
from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.errors import TransientError

if TYPE_CHECKING:
    from airflow_provider_jetstream.command.output import Output
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.inspection.job_search import FoundJob
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


_COLUMNS = ("SEQUENCE", "STORED (UTC)", "STATE", "CONSUMER", "SUBJECT", "JOB", "BYTES", "LAST ATTEMPT")
_WIDTHS = (9, 19, 13, 12, 24, 36, 9, 0)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def add_job_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-commands."""
    group = commands.add_parser("jobs", help="find stored jobs; cancel, retry or give up jobs")
    actions = group.add_subparsers(dest="action", required=True, metavar="ACTION")
    common = [connection_options(), output_options()]
    find = actions.add_parser(
        "find",
        parents=common,
        help="stored jobs that match all options, one a line; exit code 1 if there is none",
        description="Reads the queue from its first message on: pending jobs, jobs in flight and dead letters that are"
        " stored. It takes no job away from a worker.",
    )
    find.set_defaults(run=_find)
    add_queue_argument(find)
    find.add_argument("--id", dest="job_id", metavar="ID", help="of this id")
    find.add_argument("--subject", metavar="SUBJECT", help="on this subject, or filter")
    find.add_argument("--text", metavar="TEXT", help="with this text in the body")
    find.add_argument(
        "--header", action="append", type=_header, default=[], metavar="NAME[=VALUE]", help="with this header"
    )
    find.add_argument("--limit", type=positive_int, metavar="N", help="the first N of them; all where absent")
    cancel = actions.add_parser(
        "cancel",
        parents=common,
        help="cancel the jobs of these ids that are stored now, and their schedules",
        description="Workers settle cancelled jobs without running them, and stop those that run.",
    )
    cancel.set_defaults(run=_cancel)
    add_queue_argument(cancel)
    cancel.add_argument("job_ids", nargs="+", type=_job_id, metavar="ID", help="ids of jobs")
    cancel.add_argument("--why", metavar="TEXT", help="a reason, for people")
    for action, what in (
        ("retry", "have a job delivered at once that waits for its next delivery"),
        ("give-up", "make a dead letter of a job that waits for its next delivery"),
    ):
        parser = actions.add_parser(
            action,
            parents=common,
            help=f"{what}; refused unless its worker stored that it waits",
            description="The queue stores attempts. A job that may be running is left alone: the command says why.",
        )
        parser.set_defaults(run=_ask)
        add_queue_argument(parser)
        parser.add_argument("sequence", type=positive_int, metavar="SEQUENCE", help="the job's stream sequence")
        parser.add_argument("--why", metavar="TEXT", help="a reason, for people")


async def _find(options: argparse.Namespace, out: Output) -> ExitCode:
    from airflow_provider_jetstream.jetstream.attempts import AttemptReader, find_attempts_stream
    from airflow_provider_jetstream.jetstream.inspection.job_search import JobSearch, search_jobs

    search = JobSearch(options.job_id, options.subject, options.text, dict(options.header))
    name, count = stream_name(options.queue), 0
    async with opened(options, out) as connection:
        found = search_jobs(
            *(connection, name, search), lambda read, stored: out.progress(f"{read} of {stored} messages read")
        )
        stream = await find_attempts_stream(connection, name)
        reader = AttemptReader(connection, stream, name, {}) if stream else None
        async for job in found:
            stored_at = job.message.stored_at
            attempt = await reader.last_of(job.message.sequence, stored_at) if reader else None
            if out.as_json:
                out.record(_job_json(job) | {"attempt": attempt.as_json() if attempt else None})
            else:
                if not count:
                    out.row(_COLUMNS, _WIDTHS)
                out.row((*_job_row(job), attempt.describe(datetime.now(UTC)) if attempt else ""), _WIDTHS)
            count += 1
            if count == options.limit:
                break
        await found.aclose()
    if not count and not out.as_json:
        out.text("no such job is stored")
    return ExitCode.DONE if count else ExitCode.FINDINGS


def _job_row(job: FoundJob) -> tuple[object, ...]:
    message = job.message
    stored = f"{message.stored_at:%Y-%m-%d %H:%M:%S}"
    return (message.sequence, stored, job.state, job.consumer, message.subject, job.job_id, len(message.data))


def _job_json(job: FoundJob) -> dict[str, Any]:
    message = job.message
    return {
        "sequence": message.sequence,
        "job_id": readable_text(job.job_id),
        "subject": readable_text(message.subject),
        "state": job.state,
        "consumer": job.consumer,
        "stored_at": message.time,
        "headers": [[readable_text(name), readable_text(value)] for name, value in message.headers],
        "bytes": len(message.data),
    }


async def _cancel(options: argparse.Namespace, out: Output) -> ExitCode:
    from airflow_provider_jetstream.jetstream.cancellation.cancel import cancel_jobs

    async with opened(options, out) as connection:
        queue = await read_queue(connection, options.queue)
        reports = await cancel_jobs(connection, queue, options.job_ids, options.why, requester_name())
    if out.as_json:
        rows = [
            {
                "job_id": report.cancellation.job_id,
                "cancelled_at": report.cancellation.at.isoformat(),
                "schedules": report.schedules,
            }
            for report in reports
        ]
        out.document(rows)
    else:
        for report in reports:
            schedules = f", and {report.schedules} schedules" if report.schedules else ""
            out.text(f"cancelled: the jobs of id {report.cancellation.job_id} that are stored now{schedules}")
    return ExitCode.DONE


async def _ask(options: argparse.Namespace, out: Output) -> ExitCode:
    from airflow_provider_jetstream.jetstream.retries import give_up_job, retry_job

    ask = retry_job if options.action == "retry" else give_up_job
    async with opened(options, out) as connection:
        queue = await read_queue(connection, options.queue)
        report = await ask(connection, queue, options.sequence, options.why, requester_name())
    if out.as_json:
        out.document(report.as_json())
    else:
        done = "is delivered now" if report.asked == "retry" else "is a dead letter now"
        out.text(f"job {report.sequence}, which failed at attempt {report.attempt}, {done}")
    return ExitCode.DONE


def _job_id(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("expected the id of a job, found an empty text")
    return text


def _header(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"expected a header as NAME or NAME=VALUE, found {text!r}")
    return name, value


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


async def _read_queue(connection: Connection, source: str) -> WorkQueue:
    """Return the queue of a mover; a connection that is lost meanwhile is awaited."""
    while True:
        reconnects = connection.reconnects
        try:
            return await read_queue(connection, source)
        except TransientError:
            if not await connection.wait_until_connected(connection.timeout) or connection.reconnects == reconnects:
                raise


async def _move(options: argparse.Namespace, out: Output) -> ExitCode:
    from airflow_provider_jetstream.jetstream.mover import move_due_jobs

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in _SIGNALS:
        # Not in a thread that isn't the process's first, and not on every platform.
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, stop.set)
    async with opened(options, out) as connection:
        queues = [await _read_queue(connection, source) for source in options.queue]
        out.note(f"moves jobs that are due to {', '.join(queue.name for queue in queues)}")
        try:
            async with asyncio.TaskGroup() as group:
                movers = [group.create_task(move_due_jobs(connection, queue, stop=stop)) for queue in queues]
        except BaseExceptionGroup as errors:
            # The first error has cancelled the other movers.
            raise errors.exceptions[0] from None
    moved = {queue.name: mover.result() for queue, mover in zip(queues, movers, strict=True)}
    if out.as_json:
        out.document([{"queue": name, "moved": count} for name, count in moved.items()])
    else:
        for name, count in moved.items():
            out.text(f"{name}: {count} jobs moved")
    return ExitCode.DONE
