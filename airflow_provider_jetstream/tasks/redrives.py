"""Redrive requests, made from an operator's arguments or a person's action, and the lines that a redrive logs."""

from __future__ import annotations

import json
import typing
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.errors import RedriveRequestError
from airflow_provider_jetstream.tasks import runtime
from airflow_provider_jetstream.tasks.arguments import (
    check_function,
    is_absent,
    parse_flag,
    parse_number,
    parse_selection,
    parse_text,
)
from airflow_provider_jetstream.tasks.context import json_result
from airflow_provider_jetstream.tasks.queue_source import load_queue

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
    from airflow_provider_jetstream.jetstream.redrive.json_patch import JsonPatch
    from airflow_provider_jetstream.jetstream.redrive.request import Discard, Protocol, RedriveRequest

AUTO = "auto"
REDRIVE = "redrive"
PARK = "park"
IN_PLACE = "in_place"
DISCARD = "discard"
UNDO = "undo"
ACTIONS = (REDRIVE, PARK, IN_PLACE, DISCARD, UNDO)


def redrive_request(  # noqa: PLR0913 - each is an argument of its own in a DAG
    *,
    select: object,
    sequences: object,
    subject: object,
    transform: Any,
    rate: object,
    protocol: object,
    max_redrives: object,
    why: object,
    lease_timeout: Any = None,
    count_under_pause: object = False,
    target_queue: Any = None,
    order_key: object = None,
    waves: object = None,
    stop_when: object = None,
    patch: Any = None,
    discard: object = False,
    without_copy: object = False,
    undo: object = None,
) -> RedriveRequest:
    """Parse the arguments of a redrive operator after templating, which may have made text of numbers.

    :raises SelectionError: the selection isn't understood
    :raises RedriveRequestError: another argument can't be used, or not together with the others
    :raises QueueDeclarationError: the target is no work queue
    """
    check_function("transform", transform, "DeadLetter", RedriveRequestError)
    return runtime.RedriveRequest(
        selection=parse_selection(select, sequences),
        subject=parse_text(subject),
        transform=transform,
        rate=parse_number("rate", rate, float),
        protocol=_parse_protocol(protocol),
        max_redrives=parse_number("max_redrives", max_redrives, int),
        why=parse_text(why),
        lease_timeout=runtime.LEASE_TIMEOUT if is_absent(lease_timeout) else lease_timeout,
        count_under_pause=parse_flag("count_under_pause", count_under_pause, RedriveRequestError),
        target=None if is_absent(target_queue) else load_queue(target_queue),
        order_key=parse_text(order_key),
        waves=_parse_json("waves", waves) or (),
        stop_when=_parse_json("stop_when", stop_when),
        # A run's configuration without a patch may render to an empty list.
        patch=None if is_absent(patch) or patch in ([], "[]") else runtime.JsonPatch.of(patch),
        discard=_parse_discard(discard),
        without_copy=parse_flag("without_copy", without_copy, RedriveRequestError),
        undo=parse_text(undo),
    )


def request_for_action(
    action: str,
    selection: Selection,
    *,
    rate: float | None = None,
    why: str | None = None,
    patch: JsonPatch | str | None = None,
    undo: str | None = None,
) -> RedriveRequest:
    """Make the request for an action: ``redrive``, ``park``, ``in_place``, ``discard`` or ``undo``.

    :param undo: the id of the redrive whose discarded letters come back
    :raises RedriveRequestError: there is no such action, or the other arguments don't fit it
    """
    if action not in ACTIONS:
        raise RedriveRequestError(f"expected an action among {', '.join(ACTIONS)}; found {action!r}")
    if (action == UNDO) != (undo is not None):
        raise RedriveRequestError(
            f"expected the id of a redrive with the action undo only, found {action} and {undo!r}"
        )
    return runtime.RedriveRequest(
        selection=selection,
        rate=rate,
        why=why,
        patch=patch,
        max_redrives=0 if action == PARK else None,
        protocol=runtime.Protocol.IN_PLACE if action == IN_PLACE else runtime.Protocol.AUTO,
        discard=action == DISCARD,
        undo=undo,
    )


def _parse_discard(value: object) -> Discard:
    return runtime.BY_POLICY if value == runtime.BY_POLICY else parse_flag("discard", value, RedriveRequestError)


def _parse_json(name: str, value: object) -> Any:
    """Return an argument that a template may have rendered to its JSON text."""
    if is_absent(value):
        return None
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) or None
    except (ValueError, RecursionError):
        raise RedriveRequestError(f'expected {name} as JSON, such as [10, 100, "rest"], found {value!r}') from None


def _parse_protocol(value: object) -> Protocol:
    if is_absent(value):
        return runtime.Protocol.AUTO
    try:
        return runtime.Protocol(str(value))
    except ValueError:
        known = ", ".join(runtime.Protocol)
        raise RedriveRequestError(f"expected a protocol among {known}; found {value!r}") from None


class LeveledLog(typing.Protocol):
    """The methods of a task's logger that are needed here."""

    def info(self, message: str, /, *values: object) -> object:
        """Write a line."""

    def warning(self, message: str, /, *values: object) -> object:
        """Write a line that is a warning."""

    def error(self, message: str, /, *values: object) -> object:
        """Write a line that is an error."""


def log_report(log: LeveledLog, report: Mapping[str, Any]) -> None:
    """Write what a redrive has done.

    :param report: the report as JSON, with its guarantee
    """
    discarded = report.get("discarded", 0)
    if not (report["redriven"] or report["parked"] or discarded or report["failed"]):
        log.info("No dead letter of this selection was found; there is nothing to redrive")
    log.info(
        "%d dead letters redriven (%d by earlier tries), %d parked, %d failed, %d were gone; protocol %s: %s",
        *(report[name] for name in ("redriven", "resumed", "parked", "failed", "gone", "protocol", "guarantee")),
    )
    if discarded:
        log.info("%d dead letters discarded; undo it with undo=%r", discarded, report["redrive"])
    for sequence, reason in report["failures"].items():
        log.error("Dead letter %s stays where it is: %s", sequence, reason)
    if left := report["left_to_handlers"]:
        log.info("%d dead letters are left to the handlers of the dead letter queue, which have them", left)
    _log_risks(log, report)


def log_outcomes(log: LeveledLog, report: Mapping[str, Any]) -> None:
    """Write what became of the letters of each wave.

    :param report: the report as JSON
    """
    for wave in report["waves"]:
        if wave["reason"]:
            log.info("%s", wave["reason"])
    counts = report["outcomes"]
    log.info(
        "The redrive %s is %s: %d completed after redrive, %d died again, %d still running, %d unknown",
        *(report["redrive"], report["state"], *counts.values()),
    )


def log_preview(log: LeveledLog, preview: dict[str, Any], group_by: Sequence[str]) -> dict[str, Any]:
    """Write what a redrive would do.

    :param preview: the preview as JSON
    :param group_by: the fields by which its letters are grouped
    :return: the preview as a task's result
    """
    log.info(
        "A redrive would bring back %d dead letters, park %d and fail for %d; protocol %s: %s",
        *(preview[name] for name in ("redriven", "parked", "failed", "protocol", "guarantee")),
    )
    if discarded := preview.get("discarded"):
        without = preview["without_copy"]
        log.info("It would discard %d, of which %d have no copy that could bring them back", discarded, without)
    for group in preview["groups"]:
        fields = zip(group_by, group["group"], strict=True)
        log.info("%d of %s", group["count"], ", ".join(f"{name} {value or '-'}" for name, value in fields))
    if preview["changed"]:
        log.info("It would change %d of them", preview["changed"])
    for letter in preview["sample"]:
        difference = letter.get("difference")
        log.info("For example %s", json.dumps({name: value for name, value in letter.items() if name != "difference"}))
        if difference:
            log.info("Dead letter %s would change so:\n%s", letter["sequence"], difference)
    for cause, count in preview["causes"].items():
        if count > 1:
            log.warning("%d dead letters would stay: %s", count, cause)
    for sequence, reason in preview["failures"].items():
        log.warning("Dead letter %s would stay where it is: %s", sequence, reason)
    _log_risks(log, preview)
    return json_result(preview)


def _log_risks(log: LeveledLog, report: Mapping[str, Any]) -> None:
    if report["uncertain"]:
        log.warning("%d more dead letters are uncertain yet; a later redrive finds them", report["uncertain"])
    if report["undeliverable"]:
        log.warning("%d jobs match no consumer's filter; select reason undeliverable", report["undeliverable"])
    for risk in report["risks"]:
        log.warning("%s", risk)
