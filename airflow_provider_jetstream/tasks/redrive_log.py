"""The lines that a redrive writes into the task's log."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

from airflow_provider_jetstream.tasks.outcome import json_result

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class LeveledLog(Protocol):
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
