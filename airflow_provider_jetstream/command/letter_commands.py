"""The sub-commands ``letters``: list, count, show, diagnose and edit dead letters."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import tempfile
from base64 import b64encode
from difflib import unified_diff
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from airflow_provider_jetstream.command.exit_codes import ExitCode
from airflow_provider_jetstream.command.options import (
    add_queue_argument,
    connection_options,
    opened,
    output_options,
    positive_int,
    read_queue,
    requester,
    selection_of,
    selection_options,
)
from airflow_provider_jetstream.command.output import safe_line
from airflow_provider_jetstream.command.redrive_commands import show_progress
from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField
from airflow_provider_jetstream.jetstream.errors import ArgumentError, DeadLetterGoneError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from airflow_provider_jetstream.command.output import Output
    from airflow_provider_jetstream.jetstream.attempts import AttemptReport
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.repair import Repair


COLUMNS = ("SEQUENCE", "DIED (UTC)", "REASON", "CONSUMER", "SUBJECT", "JOB", "ERROR")
WIDTHS = (9, 14, 14, 12, 24, 20, 0)
_JOB_ID = 36
_STANDARD_INPUT = "-"
_LARGEST_BODY = 64 << 20
_BY_CAUSE = ("reason", "error_class", "error_place", "fingerprint")


def letter_row(letter: DeadLetter) -> tuple[object, ...]:
    """Return the letter's columns."""
    death = letter.death
    text = death.error_message or death.explanation or ""
    error = f"{death.error_class}: {text}" if death.error_class else text
    return (
        letter.sequence,
        f"{death.died_at:%m-%d %H:%M:%S}",
        death.reason,
        f"{death.consumer} (absent)" if letter.consumer_absent and death.consumer else death.consumer or "",
        letter.subject,
        safe_line(letter.job_id, _JOB_ID),
        error,
    )


def letter_json(letter: DeadLetter, *, content: bool = False) -> dict[str, Any]:
    """Return the letter for a script.

    :param content: whether headers and body belong to it
    """
    death, origin = letter.death, letter.origin
    values = {
        "sequence": letter.sequence,
        "job_id": readable_text(letter.job_id),
        "subject": readable_text(letter.subject),
        "reason": death.reason.value,
        "consumer": death.consumer,
        "consumer_absent": letter.consumer_absent,
        "stored_at": letter.time,
        "died_at": death.died_at.isoformat(),
        "deliveries": death.deliveries,
        "error_class": _readable(death.error_class),
        "error_message": _readable(death.error_message or death.explanation),
        "error_place": _readable(death.error_place),
        "traceback": [readable_text(function) for function in death.traceback],
        "worker": _readable(death.worker),
        "seconds": death.seconds,
        "fingerprint": death.fingerprint,
        "traceback_digest": death.traceback_digest,
        "redrives": letter.redrives,
        "parked": _readable(letter.parked),
        "dag_id": _readable(origin.dag_id) if origin else None,
        "run_id": _readable(origin.run_id) if origin else None,
        "task_id": _readable(origin.task_id) if origin else None,
        "map_index": origin.map_index if origin else None,
        "bytes": len(letter.body),
    }
    if content:
        values["headers"] = [[readable_text(name), readable_text(value)] for name, value in letter.headers]
        values["body"] = _utf8(letter.body)
        values["body_base64"] = b64encode(letter.body).decode()
    return values


def letter_text(letter: DeadLetter, attempts: Sequence[AttemptReport] = ()) -> str:
    """Return the letter for people: its death, the attempts at it, its headers, and its body as it is stored."""
    values = letter_json(letter)
    shown = {name: value for name, value in values.items() if value is not False and value not in (None, "", [])}
    lines = [f"{name}: {safe_line(value)}" for name, value in shown.items()]
    if attempts:
        lines += ["", "attempts:", *(f"  {safe_line(attempt.describe())}" for attempt in attempts)]
    lines += ["", "headers:", *(f"  {safe_line(name)}: {safe_line(value)}" for name, value in letter.headers)]
    body = _utf8(letter.body)
    return "\n".join([*lines, "", "body:" if body is not None else "body, which isn't UTF-8:", _shown(letter.body)])


def _shown(body: bytes) -> str:
    return body.decode("utf-8", "backslashreplace")


def _utf8(body: bytes) -> str | None:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


def _readable(text: str | None) -> str | None:
    return None if text is None else readable_text(text)


async def read_letter(connection: Connection, queue: WorkQueue, sequence: int) -> DeadLetter:
    """Read a dead letter, parked ones included.

    :raises DeadLetterGoneError: the job is no dead letter; the message says what it is
    """
    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
    from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead

    scan = await Scan.begin(connection, queue)
    (result,) = await scan.classify([sequence])
    if isinstance(result, NotDead):
        why = result.status.meaning if result.entries else f"{queue.name} has no dead job and no entry of it"
        raise DeadLetterGoneError(f"expected a dead letter of {queue.name} at sequence {sequence}, found none: {why}")
    return result


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


def add_letter_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-commands."""
    group = commands.add_parser("letters", help="list, count, show, edit or diagnose dead letters")
    actions = group.add_subparsers(dest="action", required=True, metavar="ACTION")
    common = [connection_options(), output_options()]
    selecting = [*common, selection_options()]
    listing = actions.add_parser(
        "list", parents=selecting, help="one dead letter a line, in the order of the jobs; as JSON an object a line"
    )
    listing.set_defaults(run=_list)
    add_queue_argument(listing)
    listing.add_argument("--limit", type=positive_int, metavar="N", help="the first N of them; all where absent")
    groups = actions.add_parser("groups", parents=selecting, help="count dead letters by what they share")
    groups.set_defaults(run=_groups)
    add_queue_argument(groups)
    groups.add_argument(
        "--by",
        action="append",
        choices=get_args(GroupField),
        metavar="FIELD",
        help=f"{', '.join(get_args(GroupField))}; may be given several times; by cause where absent",
    )
    show = actions.add_parser("show", parents=common, help="a dead letter with its headers and body")
    show.set_defaults(run=_show)
    add_queue_argument(show)
    show.add_argument("sequence", type=positive_int, metavar="SEQUENCE", help="its job's stream sequence")
    show.add_argument("--raw", action="store_true", help="write the body's bytes as they are, and nothing else")
    diagnose = actions.add_parser(
        "diagnose",
        parents=selecting,
        help="what broke, whether it still does, and what to do; exit code 1 if there are dead letters",
    )
    diagnose.set_defaults(run=_diagnose)
    add_queue_argument(diagnose)
    add_edit_command(actions, common)


async def _list(options: argparse.Namespace, out: Output) -> ExitCode:
    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan

    selection, count = selection_of(options), 0
    async with opened(options, out) as connection:
        queue = await read_queue(connection, options.queue)
        scan = await Scan.begin(connection, queue)
        async for letter in scan.letters(selection):
            if out.as_json:
                out.record(letter_json(letter))
            else:
                if not count:
                    out.row(COLUMNS, WIDTHS)
                out.row(letter_row(letter), WIDTHS)
            count += 1
            out.progress(f"{count} dead letters")
            if count == options.limit:
                break
        uncertain = scan.uncertain
    if not count and not out.as_json:
        out.text("no dead letters")
    if uncertain:
        out.note(f"{uncertain} more jobs may be dead: try again when nothing is in flight")
    return ExitCode.DONE


async def _groups(options: argparse.Namespace, out: Output) -> ExitCode:
    from airflow_provider_jetstream.jetstream.dead_letters.group import LetterGroups, group_fields
    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan

    selection, fields = selection_of(options), group_fields(options.by or _BY_CAUSE)
    groups, count = LetterGroups(), 0
    async with opened(options, out) as connection:
        queue = await read_queue(connection, options.queue)
        scan = await Scan.begin(connection, queue)
        async for letter in scan.letters(selection):
            groups.add(letter, fields)
            count += 1
            out.progress(f"{count} dead letters")
    largest = groups.largest()
    if out.as_json:
        rows: list[dict[str, Any]] = [
            {
                "group": dict(zip(fields, key, strict=True)),
                "count": group.count,
                "first": group.first.isoformat(),
                "last": group.last.isoformat(),
                "example": group.example,
            }
            for key, group in largest
        ]
        out.document({"queue": queue.name, "dead": count, "uncertain": scan.uncertain, "groups": rows})
        return ExitCode.DONE
    headings = ("COUNT", "FIRST (UTC)", "LAST (UTC)", "EXAMPLE", *(field.upper() for field in fields))
    lines = [
        (group.count, f"{group.first:%m-%d %H:%M:%S}", f"{group.last:%m-%d %H:%M:%S}", group.example, *key)
        for key, group in largest
    ]
    out.table(headings, lines)
    return ExitCode.DONE


async def _show(options: argparse.Namespace, out: Output) -> ExitCode:
    if options.raw and out.as_json:
        raise ArgumentError("expected --raw or --json, found both: keep one")
    if options.raw and sys.stdout.isatty():
        raise ArgumentError("expected a file or a pipe for --raw, found a terminal, on which a body's bytes could act")
    async with opened(options, out) as connection:
        queue = await read_queue(connection, options.queue)
        letter = await read_letter(connection, queue, options.sequence)
        attempts = await _attempts(connection, queue, letter)
    if options.raw:
        out.raw(letter.body)
    elif out.as_json:
        out.document(letter_json(letter, content=True) | {"attempts": [attempt.as_json() for attempt in attempts]})
    else:
        out.text(letter_text(letter, attempts))
    return ExitCode.DONE


async def _attempts(connection: Connection, queue: WorkQueue, letter: DeadLetter) -> list[AttemptReport]:
    from airflow_provider_jetstream.jetstream.attempts import read_attempts

    if queue.attempts is None:
        return []
    return await read_attempts(connection, queue, letter.sequence, deliveries=letter.death.deliveries)


async def _diagnose(options: argparse.Namespace, out: Output) -> ExitCode:
    from airflow_provider_jetstream.jetstream.dead_letters.diagnose import diagnose_dead_letters

    async with opened(options, out) as connection:
        queue = await read_queue(connection, options.queue)
        diagnosis = await diagnose_dead_letters(
            *(connection, queue, selection_of(options)),
            on_progress=lambda count: out.progress(f"{count} dead letters read"),
        )
    if out.as_json:
        out.document(diagnosis.as_json())
    else:
        out.text(str(diagnosis))
    return ExitCode.FINDINGS if diagnosis.dead or diagnosis.uncertain else ExitCode.DONE
