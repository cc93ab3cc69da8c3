"""The sub-commands ``redrive``: start one, see how far it is, pause, resume and abort it."""

from __future__ import annotations

import argparse
import asyncio
import signal
from contextlib import contextmanager, suppress
from functools import partial
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.command.exit_codes import ExitCode
from airflow_provider_jetstream.command.options import (
    add_queue_argument,
    add_sequences_option,
    connection_options,
    opened,
    output_options,
    positive_float,
    positive_int,
    read_patch,
    read_queue,
    requester,
    requester_name,
    selection_of,
    selection_options,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from airflow_provider_jetstream.command.output import Output
    from airflow_provider_jetstream.jetstream.audit.redrives import Redrive, RedriveOutcomes, Wave
    from airflow_provider_jetstream.jetstream.redrive.preview import Preview
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest


_GROUPS = 10
_FAILURES = 10
_REST = "rest"
_WAVES = "10,100,rest"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def redrive_row(redrive: Redrive) -> tuple[object, ...]:
    """Return the columns of a redrive."""
    outcomes = redrive.outcomes
    return (
        redrive.id,
        redrive.state.value,
        f"{redrive.began_at:%Y-%m-%d %H:%M:%S}",
        redrive.redriven,
        outcomes.completed,
        outcomes.died_again,
        outcomes.still_running,
        _who(redrive),
        redrive.why or "",
    )


def redrive_text(redrive: Redrive) -> str:
    """Return a redrive with its waves, and what people asked of it."""
    reason = f": {redrive.reason}" if redrive.reason else ""
    rate = f", {redrive.rate:.1f} letters/s" if redrive.rate else ""
    why = f" ({redrive.why})" if redrive.why else ""
    redriven = _redriven(redrive.redriven, redrive.waves)
    handled = f"{redriven}, {redrive.parked} parked{_discarded(redrive.discarded)}"
    lines = [
        f"redrive {redrive.id} of {redrive.stream}, {redrive.state.value}{reason}",
        f"began {redrive.began_at:%Y-%m-%d %H:%M:%S} UTC by {_who(redrive)}{why}",
        f"{handled}, {redrive.failed} failed, {redrive.gone} gone{rate}",
        outcomes_text(redrive.outcomes),
        *([f"with the patch {redrive.plan['patch']}"] if "patch" in redrive.plan else []),
        *(_wave_text(wave) for wave in redrive.waves),
    ]
    for control in redrive.controls:
        why = f": {control.why}" if control.why else ""
        lines.append(f"{control.at:%Y-%m-%d %H:%M:%S} UTC {control.action} by {control.who}{why}")
    return "\n".join(lines)


def report_text(report: RedriveReport) -> str:
    """Return what a redrive did."""
    redriven = _redriven(len(report.redriven), report.waves)
    counts = f"{redriven}, {len(report.parked)} parked{_discarded(len(report.discarded))}, {report.failures} still dead"
    lines = [
        f"redrive {report.redrive or '?'}, {report.state}{f': {report.reason}' if report.reason else ''}",
        f"{counts}, {len(report.gone)} gone",
        outcomes_text(report.outcomes),
        *(_wave_text(wave) for wave in report.waves),
        *(f"  {sequence}: {why}" for sequence, why in sorted(report.failed.items())[:_FAILURES]),
        *(f"risk: {risk}" for risk in report.risks),
    ]
    return "\n".join(lines)


def outcomes_text(outcomes: RedriveOutcomes) -> str:
    """Return what became of redriven letters."""
    return (
        f"{outcomes.completed} completed after the redrive, {outcomes.died_again} died again,"
        f" {outcomes.still_running} still running, {outcomes.unknown} not known"
    )


def preview_text(preview: Preview) -> str:
    """Return what a redrive would do."""
    handled = f"{preview.redriven} would be redriven, {preview.parked} parked{_discarded(preview.discarded)}"
    lines = [
        f"dry run: {handled}, {preview.failures} would stay",
        f"protocol {preview.protocol}: {preview.guarantee}",
    ]
    for key, group in preview.groups.largest()[:_GROUPS]:
        lines.append(f"  {group.count}: {', '.join(value for value in key if value)}")
    if preview.without_copy:
        lines.append(f"{preview.without_copy} of them have no copy that could bring them back")
    if preview.changed:
        lines.append(f"{preview.changed} of them would be changed")
    for letter in preview.sample:
        if letter.get("difference"):
            lines += [f"letter {letter['sequence']} would change so:", letter["difference"]]
    several = sorted((item for item in preview.causes.items() if item[1] > 1), key=lambda cause: -cause[1])
    lines += [f"{count} would stay: {why}" for why, count in several[:_FAILURES]]
    lines += [f"  {sequence}: {why}" for sequence, why in list(preview.failed.items())[:_FAILURES]]
    lines += [f"risk: {risk}" for risk in preview.risks]
    return "\n".join(lines)


def _discarded(count: int) -> str:
    return f", {count} discarded" if count else ""


def _redriven(count: int, waves: Sequence[Wave]) -> str:
    """Return how many letters were redriven, and how many of them are counted twice."""
    again = sum(wave.brought_again for wave in waves)
    return f"{count} redriven" + (f" ({again} of them once more after they had died again)" if again else "")


def _wave_text(wave: Wave) -> str:
    size = "the rest" if wave.size is None else f"{wave.size} letters"
    passed = f", passed by {wave.passed_by}" if wave.passed_by else ""
    reason = f": {wave.reason}" if wave.reason else ""
    lines = [f"wave {wave.number} ({size}), {wave.state}{passed}{reason}", f"  {outcomes_text(wave.outcomes)}"]
    lines += [f"  {death.count} died of {death.error or death.fingerprint}" for death in wave.died_of]
    return "\n".join(lines)


def _who(redrive: Redrive) -> str:
    who = redrive.who
    name = who.get("person") or who.get("user") or who.get("dag_id") or "somebody"
    return str(name)


def add_redrive_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-commands."""
    group = commands.add_parser("redrive", help="bring dead letters back, and steer redrives")
    actions = group.add_subparsers(dest="action", required=True, metavar="ACTION")
    common = [connection_options(), output_options()]
    _add_start(actions, [*common, selection_options()])
    _add_discard(actions, common)
    status = actions.add_parser("status", parents=common, help="the latest redrives of a queue, or one of them")
    status.set_defaults(run=_status)
    add_queue_argument(status)
    status.add_argument("redrive", nargs="?", metavar="ID", help="of one redrive, with its waves and controls")
    status.add_argument("--limit", type=positive_int, default=20, metavar="N", help="the latest N; 20 where absent")
    for name, text in (
        ("pause", "have a redrive stop before its next letters"),
        ("resume", "have a redrive go on that is paused, or waits at the gate after a wave"),
        ("abort", "end a redrive; letters that aren't begun stay where they are"),
    ):
        steer = actions.add_parser(name, parents=common, help=text)
        steer.set_defaults(run=_steer)
        add_queue_argument(steer)
        steer.add_argument("redrive", metavar="ID", help="the redrive's id, as status prints it")
        steer.add_argument("--why", metavar="TEXT", help="a reason, for the audit")
        if name == "resume":
            steer.add_argument(
                "--park-returned", action="store_true", help="at a gate: park the letters of the wave that died again"
            )


def _add_start(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], parents: list[argparse.ArgumentParser]
) -> None:
    start = actions.add_parser(
        "start",
        parents=parents,
        help="bring dead letters back as jobs; exit code 1 unless all were, and none is known to have died again",
        description="Ctrl-C stops it after the letters that are begun; the same command with --run goes on.",
    )
    start.set_defaults(run=_start, request=_request)
    add_queue_argument(start)
    few = start.add_mutually_exclusive_group()
    few.add_argument("--first", type=positive_int, metavar="N", help="only N letters, and see what becomes of them")
    few.add_argument(
        "--waves",
        nargs="?",
        const=_WAVES,
        type=_waves,
        metavar="N,M,rest",
        help=f"in waves with a gate after each; {_WAVES} where no sizes are given",
    )
    start.add_argument("--dry-run", action="store_true", help="only say what it would do")
    start.add_argument("--stop-when", type=_share, metavar="SHARE", help="stop if more of a wave die again; 0.2")
    start.add_argument("--rate", type=positive_float, metavar="N", help="letters a second at most")
    start.add_argument("--max-redrives", type=int, metavar="N", help="park letters that were redriven N times")
    start.add_argument(
        "--patch",
        metavar="FILE|JSON",
        help="change their bodies: a JSON Patch (RFC 6902), or its file; - reads the standard input. With --dry-run the"
        " difference of the first ones is shown",
    )
    start.add_argument("--why", metavar="TEXT", help="a reason, for the audit")
    start.add_argument("--run", dest="run_key", metavar="KEY", help="go on with the redrive of this key")


def _add_discard(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], common: list[argparse.ArgumentParser]
) -> None:
    discard = actions.add_parser(
        "discard",
        parents=[*common, selection_options()],
        help="drop dead letters, recorded in the audit; exit code 1 unless all were",
        description="redrive undo with the printed id brings them back, as long as a copy is stored.",
    )
    discard.set_defaults(run=_start, request=_discard_request)
    discard.add_argument(
        "--by-policy",
        action="store_true",
        help="those that dead_letters.keep of the queue's FILE keeps no longer",
    )
    discard.add_argument(
        "--without-copy",
        action="store_true",
        help="also letters without a stored copy: nothing brings them back",
    )
    undo = actions.add_parser(
        "undo",
        parents=common,
        help="bring back, parked, what a redrive has discarded; exit code 1 unless all came back",
    )
    undo.set_defaults(run=_start, request=_undo_request)
    for parser in (discard, undo):
        add_queue_argument(parser)
        parser.add_argument("--dry-run", action="store_true", help="only say what it would do")
        parser.add_argument("--rate", type=positive_float, metavar="N", help="letters a second at most")
        parser.add_argument("--why", metavar="TEXT", help="a reason, for the audit")
        parser.add_argument("--run", dest="run_key", metavar="KEY", help="go on with the redrive of this key")
    undo.add_argument("redrive", metavar="ID", help="the id of the redrive that discarded them, as status prints it")
    add_sequences_option(undo)


async def _start(options: argparse.Namespace, out: Output) -> ExitCode:
    from airflow_provider_jetstream.jetstream.redrive.preview import preview
    from airflow_provider_jetstream.jetstream.redrive.redrive import redrive_dead_letters

    async with opened(options, out) as connection:
        queue = await read_queue(connection, options.queue)
        request = await asyncio.to_thread(options.request, options)
        if options.dry_run:
            shown = await preview(connection, queue, request)
            if out.as_json:
                out.document(shown.as_json())
            else:
                out.text(preview_text(shown))
            return ExitCode.FINDINGS if shown.failures else ExitCode.DONE
        with _stop_by_signal(out) as stop:
            report = await redrive_dead_letters(
                *(connection, queue, request),
                progress=partial(show_progress, out),
                stopped=stop.is_set,
            )
    if out.as_json:
        out.document({"run": request.run, **report.as_json()})
    else:
        out.text(report_text(report))
    if stop.is_set():
        out.note(f"stopped; the same command with --run {request.run} goes on")
        return ExitCode.INTERRUPTED
    return ExitCode.DONE if _is_well(report) else ExitCode.FINDINGS


def _request(options: argparse.Namespace) -> RedriveRequest:
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest

    return RedriveRequest(
        selection_of(options),
        waves=[options.first] if options.first else options.waves or (),
        stop_when=options.stop_when,
        max_redrives=options.max_redrives,
        patch=None if options.patch is None else read_patch(options.patch),
        **_common_fields(options),
    )


def _discard_request(options: argparse.Namespace) -> RedriveRequest:
    from airflow_provider_jetstream.jetstream.redrive.request import BY_POLICY, RedriveRequest

    fields: dict[str, Any] = {"discard": BY_POLICY if options.by_policy else True, "without_copy": options.without_copy}
    return RedriveRequest(selection_of(options), **fields | _common_fields(options))


def _undo_request(options: argparse.Namespace) -> RedriveRequest:
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest

    return RedriveRequest(selection_of(options), undo=options.redrive, **_common_fields(options))


def _common_fields(options: argparse.Namespace) -> dict[str, Any]:
    run = options.run_key or f"cli-{token_hex(4)}"
    return {"rate": options.rate, "why": options.why, "who": requester(), "run": run}


def show_progress(out: Output, report: RedriveReport) -> None:
    """Show what a redrive has done so far, and what it waits for."""
    if report.waiting:
        out.note(f"waits {report.waiting}")
    else:
        out.progress(_progress(report))


def _progress(report: RedriveReport) -> str:
    counts = {"redriven": len(report.redriven), "parked": len(report.parked), "discarded": len(report.discarded)}
    counts["failed"] = report.failures
    outcomes = {name.replace("_", " "): count for name, count in report.outcomes.model_dump().items()}
    return ", ".join(f"{count} {name}" for name, count in (counts | outcomes).items() if count) or "waiting"


def _is_well(report: RedriveReport) -> bool:
    return not (report.failures or report.cancelled or report.outcomes.died_again) and report.state == "finished"


@contextmanager
def _stop_by_signal(out: Output) -> Iterator[asyncio.Event]:
    """Have the first signal stop a redrive where it can go on, and the second one the program."""
    stop, loop, task = asyncio.Event(), asyncio.get_running_loop(), asyncio.current_task()

    def receive() -> None:
        if stop.is_set() and task:
            task.cancel()
        stop.set()
        out.note("stopping after the letters that are begun; once more to stop at once")

    for number in _SIGNALS:
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, receive)
    yield stop


async def _status(options: argparse.Namespace, out: Output) -> ExitCode:
    from airflow_provider_jetstream.jetstream.audit.redrives import list_redrives, read_redrive

    async with opened(options, out) as connection:
        queue = await read_queue(connection, options.queue)
        if options.redrive:
            redrive = await read_redrive(connection, queue, options.redrive)
            _print_redrive(redrive, out)
            return ExitCode.DONE
        redrives = await list_redrives(connection, queue, limit=options.limit)
    if out.as_json:
        out.document([redrive_json(redrive) for redrive in redrives])
    else:
        headings = ("ID", "STATE", "BEGAN (UTC)", "REDRIVEN", "COMPLETED", "DIED AGAIN", "RUNNING", "WHO", "WHY")
        out.table(headings, [redrive_row(redrive) for redrive in redrives])
    return ExitCode.DONE


async def _steer(options: argparse.Namespace, out: Output) -> ExitCode:
    from airflow_provider_jetstream.jetstream.audit.redrives import abort_redrive, pause_redrive, resume_redrive

    fields: dict[str, Any] = {"who": requester_name(), "why": options.why}
    if options.action == "resume":
        fields["park_returned"] = options.park_returned
    steer = {"pause": pause_redrive, "resume": resume_redrive, "abort": abort_redrive}[options.action]
    async with opened(options, out) as connection:
        queue = await read_queue(connection, options.queue)
        redrive = await steer(connection, queue, options.redrive, **fields)
    _print_redrive(redrive, out)
    if redrive.pending and not out.as_json:
        out.note(f"the program that runs it obeys; if none does: redrive start {queue.name} --run {redrive.run}")
    return ExitCode.DONE


def _print_redrive(redrive: Redrive, out: Output) -> None:
    if out.as_json:
        out.document(redrive_json(redrive))
    else:
        out.text(redrive_text(redrive))


def redrive_json(redrive: Redrive) -> dict[str, Any]:
    """Return a redrive for a script: its record, and what people asked of it."""
    controls = [control.model_dump(mode="json") for control in redrive.controls]
    return redrive.model_dump(mode="json") | {"controls": controls}


def _waves(text: str) -> list[int | str]:
    sizes: list[int | str] = []
    for part in text.split(","):
        if not (part == _REST or (part.isascii() and part.isdecimal() and int(part[:10]) > 0)):
            raise argparse.ArgumentTypeError(f"expected sizes of waves such as {_WAVES}, found {text!r}")
        sizes.append(_REST if part == _REST else int(part[:10]))
    return sizes


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"expected a share from 0 to 1, found {text!r}")
    return share
