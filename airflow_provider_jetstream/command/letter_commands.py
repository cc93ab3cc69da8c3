"""The sub-commands ``letters``: list, count, show and diagnose dead letters."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, get_args

from airflow_provider_jetstream.command.connection_options import connection_options
from airflow_provider_jetstream.command.exit_codes import ExitCode
from airflow_provider_jetstream.command.letter_edit_command import add_edit_command
from airflow_provider_jetstream.command.letter_lines import COLUMNS, WIDTHS, letter_json, letter_row, letter_text
from airflow_provider_jetstream.command.number_options import positive_int
from airflow_provider_jetstream.command.output_options import output_options
from airflow_provider_jetstream.command.queue_argument import add_queue_argument, opened, read_queue
from airflow_provider_jetstream.command.selection_options import selection_of, selection_options
from airflow_provider_jetstream.command.stored_letter import read_letter
from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField
from airflow_provider_jetstream.jetstream.errors import ArgumentError

if TYPE_CHECKING:
    import argparse

    from airflow_provider_jetstream.command.output import Output

_BY_CAUSE = ("reason", "error_class", "error_place", "fingerprint")
_PAGE = 64


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
        scan.page_size = _PAGE
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
        scan.page_size = _PAGE
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
    if options.raw:
        out.raw(letter.body)
    elif out.as_json:
        out.document(letter_json(letter, content=True))
    else:
        out.text(letter_text(letter))
    return ExitCode.DONE


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
