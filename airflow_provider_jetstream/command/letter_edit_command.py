"""The sub-command ``letters edit``: changes the body of one dead letter, shows the difference, and redrives it."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import tempfile
from difflib import unified_diff
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.command.exit_codes import ExitCode
from airflow_provider_jetstream.command.number_options import positive_int
from airflow_provider_jetstream.command.queue_argument import add_queue_argument, opened, read_queue
from airflow_provider_jetstream.command.redrive_commands import show_progress
from airflow_provider_jetstream.command.requester import requester
from airflow_provider_jetstream.command.stored_letter import read_letter
from airflow_provider_jetstream.jetstream.errors import ArgumentError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from airflow_provider_jetstream.command.output import Output
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.redrive.repair import Repair

_STANDARD_INPUT = "-"
_LARGEST_BODY = 64 << 20


def add_edit_command(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], parents: Sequence[argparse.ArgumentParser]
) -> None:
    """Add the sub-command."""
    edit = actions.add_parser(
        "edit",
        parents=list(parents),
        help="change a dead letter's body, see the difference, and redrive it",
        description="Opens the body as it is stored in the editor that EDITOR names, or takes the new one from a file."
        " The audit keeps the change.",
    )
    edit.set_defaults(run=_edit)
    add_queue_argument(edit)
    edit.add_argument("sequence", type=positive_int, metavar="SEQUENCE", help="its job's stream sequence")
    edit.add_argument("--body", metavar="FILE", help="the new body; - reads the standard input")
    edit.add_argument("--why", metavar="TEXT", help="a reason, for the audit")
    edit.add_argument("--dry-run", action="store_true", help="show the difference only")
    edit.add_argument("--yes", action="store_true", help="redrive without a question")


async def _edit(options: argparse.Namespace, out: Output) -> ExitCode:
    async with opened(options, out) as connection:
        queue = await read_queue(connection, options.queue)
        letter = await read_letter(connection, queue, options.sequence)
        body = await asyncio.to_thread(_new_body, options.body, letter.body)
        difference = body_difference(letter.body, body)
        result: dict[str, Any] = {"sequence": letter.sequence, "difference": difference, "redriven": None}
        if not out.as_json:
            out.text("\n".join(difference) or "no difference")
        if body == letter.body or options.dry_run:
            return _done(result, out)
        if not options.yes and not await asyncio.to_thread(_confirms, out):
            return _done(result, out)
        result["redriven"] = await _redrive(options, out, connection, queue, letter, body)
    out.note(f"sequence {letter.sequence} is redriven as sequence {result['redriven']}")
    return _done(result, out)


async def _redrive(
    options: argparse.Namespace, out: Output, connection: Any, queue: Any, letter: DeadLetter, body: bytes
) -> int:
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
    from airflow_provider_jetstream.jetstream.errors import RedriveError
    from airflow_provider_jetstream.jetstream.redrive.redrive import redrive_dead_letters
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest

    selection = Selection(sequences=frozenset({letter.sequence}), parked=letter.parked is not None)
    request = RedriveRequest(selection, transform=partial(_repair, body), why=options.why, who=requester())
    report = await redrive_dead_letters(connection, queue, request, progress=partial(show_progress, out))
    if letter.sequence not in report.redriven:
        why = report.failed.get(letter.sequence, "it is no dead letter any more")
        raise RedriveError(f"sequence {letter.sequence} wasn't redriven: {why}")
    return report.redriven[letter.sequence]


def _repair(body: bytes, letter: DeadLetter) -> Repair:
    from airflow_provider_jetstream.jetstream.redrive.repair import Repair

    return Repair(body=body)


def body_difference(before: bytes, after: bytes) -> list[str]:
    """Return the lines in which two bodies differ, as a unified diff; what isn't UTF-8 is escaped."""
    old, new = (body.decode("utf-8", "backslashreplace").splitlines() for body in (before, after))
    return [line.removesuffix("\n") for line in unified_diff(old, new, "stored", "edited")]


def _new_body(path: str | None, stored: bytes) -> bytes:
    try:
        if path == _STANDARD_INPUT:
            return sys.stdin.buffer.read(_LARGEST_BODY)
        if path is not None:
            return Path(path).read_bytes()
    except OSError as error:
        raise ArgumentError(f"expected the new body in {path!r}, found {error.strerror}") from None
    return _edited(stored)


def _edited(stored: bytes) -> bytes:
    import subprocess

    command = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi")
    if not sys.stdin.isatty():
        raise ArgumentError("expected a terminal for the editor, found none: give the new body with --body")
    with tempfile.TemporaryDirectory(prefix="jetstream-queue-") as folder:
        file = Path(folder, "body")
        file.write_bytes(stored)
        try:
            # The person's own editor, as every program runs it that lets people edit.
            subprocess.run([*command, str(file)], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ArgumentError(f"expected {command[0]!r} to edit the body, found: {error}; set EDITOR") from None
        edited = file.read_bytes()
    # Editors end the last line of a text; a body that had no line break at its end has none afterwards.
    return edited.removesuffix(b"\n") if edited.endswith(b"\n") and not stored.endswith(b"\n") else edited


def _confirms(out: Output) -> bool:
    if not sys.stdin.isatty():
        raise ArgumentError("expected --yes where nobody can be asked, found no terminal: see the difference first")
    out.note("redrive it so? [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _done(result: dict[str, Any], out: Output) -> ExitCode:
    if out.as_json:
        out.document(result)
    return ExitCode.DONE
