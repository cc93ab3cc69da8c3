"""What became of letters, as rows on their way from tasks to the driver, and as a report there."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Iterable

    from airflow_provider_jetstream.jetstream.redrive.preview import Preview
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport

OUTCOME_DDL: Final = "sequence bigint, outcome string, number bigint, told string"
_SCHEMA: Final = pa.schema(
    [("sequence", pa.int64()), ("outcome", pa.string()), ("number", pa.int64()), ("told", pa.string())]
)

REDRIVEN: Final = "redriven"
PARKED: Final = "parked"
FAILED: Final = "failed"
GONE: Final = "gone"
ENTRIES_LEFT: Final = "entries left"
CANCELLED: Final = "cancelled"
# Only a new look at the whole queue can tell what is dead.
DOUBTFUL: Final = "doubtful"
PREVIEW: Final = "preview"

_NAMED_FAILURES = 100
_SAMPLE = 5


class Outcomes:
    """What became of some letters, as a task notes it."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, str, int | None, str | None]] = []

    def fail(self, sequence: int, why: str) -> None:
        """Take note of a letter that stayed.

        :param sequence: its stream sequence
        :param why: why
        """
        self._rows.append((sequence, FAILED, None, why))

    def leave(self, sequences: Iterable[int], *, cancelled: bool) -> None:
        """Take note of letters that weren't looked at.

        :param sequences: their stream sequences
        :param cancelled: whether the redrive was told to stop; the queue has to be looked at again otherwise
        """
        self._rows += ((sequence, CANCELLED if cancelled else DOUBTFUL, None, None) for sequence in sequences)

    def take(self, report: RedriveReport) -> None:
        """Take note of all that a report says.

        :param report: of some letters
        """
        # By position: a look-up of each would be a search.
        redriven = zip(report.redriven, report.redriven.new_sequences(), strict=True)
        self._rows += ((sequence, REDRIVEN, new, None) for sequence, new in redriven)
        self._rows += ((sequence, PARKED, None, None) for sequence in report.parked)
        self._rows += ((sequence, FAILED, None, why) for sequence, why in report.failed.items())
        self._rows += ((sequence, GONE, None, None) for sequence in report.gone)
        if report.entries_left:
            self._rows.append((0, ENTRIES_LEFT, report.entries_left, None))

    def preview(self, preview: Preview) -> None:
        """Take note of what would be done.

        :param preview: of all letters of a task
        """
        told: dict[str, Any] = {"groups": [[list(group), count] for group, count in preview.groups.items()]}
        told |= {"redriven": preview.redriven, "parked": preview.parked, "failures": preview.failures}
        told |= {"failed": list(preview.failed.items()), "sample": preview.sample}
        self._rows.append((0, PREVIEW, None, json.dumps(told)))

    def batch(self) -> pa.RecordBatch:
        """Give the rows.

        :return: a row for each letter
        """
        columns = list(zip(*self._rows, strict=True)) or [()] * len(_SCHEMA)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)


def add_outcomes(report: RedriveReport, rows: pa.Table) -> frozenset[int]:
    """Put what tasks noted into the report of the whole.

    :param report: of the whole
    :param rows: of all tasks
    :return: the letters that weren't looked at, since only a new look at the queue can tell what is dead
    """
    doubtful: set[int] = set()
    # What a report adds in order it adds without a search.
    for sequence, outcome, number, told in zip(*_columns(rows.sort_by("sequence")), strict=True):
        if outcome == REDRIVEN:
            report.redriven.add(sequence, number)
        elif outcome == PARKED:
            report.add_parked(sequence)
        elif outcome == FAILED:
            report.add_failure(sequence, told)
        elif outcome == GONE:
            report.add_gone(sequence)
        elif outcome == ENTRIES_LEFT:
            report.entries_left += number
        elif outcome == DOUBTFUL:
            doubtful.add(sequence)
        elif outcome == CANCELLED:
            report.cancelled = True
    return frozenset(doubtful)


def add_previews(preview: Preview, rows: pa.Table) -> bool:
    """Put what tasks would do into the preview of the whole.

    :param preview: of the whole
    :param rows: of all tasks
    :return: whether they looked at all letters
    """
    complete = True
    for sequence, outcome, _, told in zip(*_columns(rows.sort_by("sequence")), strict=True):
        if outcome == FAILED:
            preview.failures += 1
            preview.failed |= {sequence: told} if len(preview.failed) < _NAMED_FAILURES else {}
        elif outcome == DOUBTFUL:
            complete = False
        elif outcome == PREVIEW:
            found = json.loads(told)
            preview.redriven += found["redriven"]
            preview.parked += found["parked"]
            preview.failures += found["failures"]
            preview.failed = dict([*preview.failed.items(), *found["failed"]][:_NAMED_FAILURES])
            preview.sample = sorted([*preview.sample, *found["sample"]], key=lambda each: each["sequence"])[:_SAMPLE]
            preview.groups += Counter({tuple(group): count for group, count in found["groups"]})
    return complete


def _columns(rows: pa.Table) -> list[list[object]]:
    return [rows.column(field.name).to_pylist() for field in _SCHEMA]
