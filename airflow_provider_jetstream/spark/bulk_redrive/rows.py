"""A task's input: rows of the frame, and the entries about the same letters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_jetstream.jetstream.client.headers import is_servers
from airflow_provider_jetstream.jetstream.redrive.repair import ORIGIN_HEADERS, UNCHANGED, Repair
from airflow_provider_jetstream.spark.dead_letters.entry_table import JOB_SCHEMA, entries_from_columns, unpack_table
from airflow_provider_jetstream.spark.dead_letters.letter_rows import as_valid_text
from airflow_provider_jetstream.spark.dead_letters.schema import BODY, HEADERS, REPAIRED, SEQUENCE, SUBJECT
from airflow_provider_jetstream.spark.errors import SparkOptionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql.types import StructType

    from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter

# The column of a task's first row, with the packed entries of the task's letters.
PACKED_ENTRIES: Final = "packed_entries"

_TYPES: Final = {
    SEQUENCE: ("bigint", "int"),
    SUBJECT: ("string",),
    BODY: ("binary", "string"),
    HEADERS: ("array<struct<key:string,value:string>>",),
    REPAIRED: ("boolean",),
}


class TaskJob(NamedTuple):
    """A letter to be redriven: the frame's row, and the entries about it."""

    row: RequestedLetter
    entries: tuple[Entry, ...]


def read_windows(batches: Iterator[pa.RecordBatch], size: int) -> Iterator[list[TaskJob]]:
    """Read a partition of :func:`~.spark_job.partition_letters`, ``size`` letters at a time."""
    jobs = pa.RecordBatch.from_pylist([], JOB_SCHEMA)
    for batch in batches:
        packed = batch.column(PACKED_ENTRIES)
        if packed.null_count < len(packed):
            tables = [unpack_table(value).read_all() for value in packed.drop_null()]
            (jobs,) = pa.concat_tables(tables).combine_chunks().to_batches()
        rows = batch.filter(packed.is_null()).drop_columns([PACKED_ENTRIES])
        for start in range(0, rows.num_rows, size):
            window = rows.slice(start, size)
            values = zip(*(column.to_pylist() for column in window.columns), strict=True)
            yield [
                TaskJob(RequestedLetter.from_row(dict(zip(window.schema.names, row, strict=True))), entries)
                for row, entries in zip(values, _find_entries(jobs, window.column(SEQUENCE)), strict=True)
            ]


def _find_entries(jobs: pa.RecordBatch, sequences: pa.Array) -> list[tuple[Entry, ...]]:
    """Look up the entries of letters; none for letters without a row."""
    indexes = pc.index_in(sequences.cast(pa.int64()), jobs.column(SEQUENCE))
    return entries_from_columns([jobs.column(name).take(indexes) for name in JOB_SCHEMA.names[1:]])


def used_columns(schema: StructType, known: frozenset[str]) -> tuple[str, ...]:
    """Return the columns of a frame that a redrive uses.

    :param known: columns of letters that are allowed and not used
    :raises SparkOptionError: the sequence is missing, or a column is unknown or of another type
    """
    names = schema.fieldNames()
    if SEQUENCE not in names:
        raise SparkOptionError(
            f"expected a column {SEQUENCE} with the letters' stream sequences, found {', '.join(names) or 'none'}: take"
            " the letters as read_letters returns them"
        )
    for field in schema.fields:
        kinds = _TYPES.get(field.name)
        if kinds is None and field.name not in known:
            raise SparkOptionError(
                f"expected columns among {', '.join(_TYPES)} and those of the letters, found {field.name}: a redrive"
                " wouldn't use it; drop it"
            )
        if kinds is not None and field.dataType.simpleString() not in kinds:
            raise SparkOptionError(
                f"expected the column {field.name} as {' or '.join(kinds)}, found {field.dataType.simpleString()}: cast"
                " it"
            )
    return tuple(name for name in _TYPES if name in names)


@dataclass(frozen=True, slots=True)
class RequestedLetter:
    """A frame's row: a letter, and what the job becomes; ``None`` leaves a part as it is.

    :param sequence: the letter's stream sequence
    :param headers: all headers
    """

    sequence: int
    subject: str | None = None
    body: bytes | None = None
    headers: tuple[tuple[str, str], ...] | None = None

    @classmethod
    def from_row(cls, values: Mapping[str, Any]) -> RequestedLetter:
        """Convert the used columns of a row.

        :raises SparkOptionError: the sequence is null
        """
        if values[SEQUENCE] is None:
            raise SparkOptionError(f"expected a {SEQUENCE} in every row, found null: drop rows that are no letters")
        if values.get(REPAIRED) is False:
            return cls(values[SEQUENCE])
        body, headers = values.get(BODY), values.get(HEADERS)
        return cls(
            values[SEQUENCE],
            values.get(SUBJECT),
            body.encode() if isinstance(body, str) else body,
            None if headers is None else tuple((pair["key"] or "", pair["value"] or "") for pair in headers),
        )

    def repair(self, letter: DeadLetter) -> Repair | None:
        """Return what changes compared with the stored letter; ``None`` where nothing does."""
        body = UNCHANGED if self.body is None or self.body == letter.body else self.body
        subject = None if self.subject in (None, as_valid_text(letter.subject)) else self.subject
        headers = {} if self.headers is None else self._changed_headers(letter)
        if body is UNCHANGED and subject is None and not headers:
            return None
        return Repair(body, headers, subject)

    def _changed_headers(self, letter: DeadLetter) -> dict[str, tuple[str, ...] | None]:
        """Compare headers by name, without those that only the server or a redrive sets."""
        requested = _by_name(self.headers or ())
        stored = _by_name(letter.headers)
        changed: dict[str, tuple[str, ...] | None] = {}
        for name in dict.fromkeys((*requested, *stored)):
            if not name or is_servers(name) or name in ORIGIN_HEADERS:
                continue
            # Spark's strings hold only UTF-8.
            readable = [as_valid_text(value) for value in stored.get(name, ())]
            if requested.get(name, []) != readable:
                changed[name] = tuple(requested[name]) if name in requested else None
        return changed


def _by_name(headers: tuple[tuple[str, str], ...]) -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    for name, value in headers:
        values.setdefault(name, []).append(value)
    return values
