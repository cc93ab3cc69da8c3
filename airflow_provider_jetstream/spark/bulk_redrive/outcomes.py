"""The outcomes of letters: rows on their way from tasks to the driver, and the report that they add up to."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Iterable

    from airflow_provider_jetstream.jetstream.redrive.preview import Preview
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport

OUTCOME_DDL: Final = "sequence bigint, outcome string, number bigint, detail string"
_SCHEMA: Final = pa.schema(
    [("sequence", pa.int64()), ("outcome", pa.string()), ("number", pa.int64()), ("detail", pa.string())]
)

REDRIVEN: Final = "redriven"
PARKED: Final = "parked"
FAILED: Final = "failed"
GONE: Final = "gone"
ENTRIES_LEFT: Final = "entries left"
CANCELLED: Final = "cancelled"
# Only another scan of the whole queue can prove what is dead.
NEEDS_RESCAN: Final = "needs rescan"
PREVIEW: Final = "preview"

_MOST_FAILURES = 100
_SAMPLE = 5


class Outcomes:
    """A task's outcomes of some letters."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, str, int | None, str | None]] = []

    def add_failure(self, sequence: int, reason: str) -> None:
        """Add a letter that stays a dead letter."""
        self._rows.append((sequence, FAILED, None, reason))

    def add_unprocessed(self, sequences: Iterable[int], *, cancelled: bool) -> None:
        """Add letters that weren't processed: the run was cancelled, or the queue needs another scan."""
        self._rows += ((sequence, CANCELLED if cancelled else NEEDS_RESCAN, None, None) for sequence in sequences)

    def add_report(self, report: RedriveReport) -> None:
        """Add the letters of a report."""
        # By position: looking each one up would be a search.
        redriven = zip(report.redriven, report.redriven.new_sequences(), strict=True)
        self._rows += ((sequence, REDRIVEN, new, None) for sequence, new in redriven)
        self._rows += ((sequence, PARKED, None, None) for sequence in report.parked)
        self._rows += ((sequence, FAILED, None, reason) for sequence, reason in report.failed.items())
        self._rows += ((sequence, GONE, None, None) for sequence in report.gone)
        if report.entries_left:
            self._rows.append((0, ENTRIES_LEFT, report.entries_left, None))

    def add_preview(self, preview: Preview) -> None:
        """Add the preview of all letters of a task."""
        content: dict[str, Any] = {"groups": preview.groups.as_json()}
        content |= {"redriven": preview.redriven, "parked": preview.parked, "failures": preview.failures}
        content |= {"failed": list(preview.failed.items()), "sample": preview.sample}
        content |= {"changed": preview.changed, "causes": preview.causes}
        self._rows.append((0, PREVIEW, None, json.dumps(content)))

    def batch(self) -> pa.RecordBatch:
        """Return a row per outcome."""
        columns = list(zip(*self._rows, strict=True)) or [()] * len(_SCHEMA)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)


def sequences_with(rows: pa.Table, outcome: str) -> list[int]:
    """Return the letters that have an outcome."""
    found: list[int] = rows.filter(pc.equal(rows.column("outcome"), outcome)).column("sequence").to_pylist()
    return found


def add_outcomes(report: RedriveReport, rows: pa.Table) -> frozenset[int]:
    """Add the outcomes of all tasks to a report, and return the letters that need another scan of the queue."""
    to_rescan: set[int] = set()
    # A report adds letters in order without a search.
    for sequence, outcome, number, detail in zip(*_columns(rows.sort_by("sequence")), strict=True):
        if outcome == REDRIVEN:
            report.redriven.add(sequence, number)
        elif outcome == PARKED:
            report.add_parked(sequence)
        elif outcome == FAILED:
            report.add_failure(sequence, detail)
        elif outcome == GONE:
            report.add_gone(sequence)
        elif outcome == ENTRIES_LEFT:
            report.entries_left += number
        elif outcome == NEEDS_RESCAN:
            to_rescan.add(sequence)
        elif outcome == CANCELLED:
            report.cancelled = True
    return frozenset(to_rescan)


def add_previews(preview: Preview, rows: pa.Table) -> bool:
    """Add the previews of all tasks to one, and return whether they cover all letters."""
    complete = True
    for sequence, outcome, _, detail in zip(*_columns(rows.sort_by("sequence")), strict=True):
        if outcome == FAILED:
            preview.add_failure(sequence, detail)
        elif outcome == NEEDS_RESCAN:
            complete = False
        elif outcome == PREVIEW:
            content = json.loads(detail)
            preview.redriven += content["redriven"]
            preview.parked += content["parked"]
            preview.failures += content["failures"]
            preview.changed += content["changed"]
            for cause, count in content["causes"].items():
                preview.causes[cause] = preview.causes.get(cause, 0) + count
            preview.failed = dict([*preview.failed.items(), *content["failed"]][:_MOST_FAILURES])
            sample = sorted([*preview.sample, *content["sample"]], key=lambda letter: letter["sequence"])
            preview.sample = sample[:_SAMPLE]
            preview.groups.merge_json(content["groups"])
    return complete


def _columns(rows: pa.Table) -> list[list[Any]]:
    return [rows.column(field.name).to_pylist() for field in _SCHEMA]
