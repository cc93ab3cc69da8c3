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
from airflow_provider_jetstream.spark.dead_letters.schema import (
    BODY,
    HEADERS,
    PROBLEM,
    REPAIRED,
    SEQUENCE,
    STREAM_CREATED,
    SUBJECT,
)
from airflow_provider_jetstream.spark.errors import RepairContractError, SparkOptionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

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
    STREAM_CREATED: ("string",),
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
        if field.name == PROBLEM:
            raise SparkOptionError(
                f"expected letters that were checked, found the column {PROBLEM} of a repair's files: read them with"
                " read_repaired, which checks them"
            )
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
    :param created: when the letter's stream was created, in the server's own text; ``None`` where the frame doesn't say
    """

    sequence: int
    subject: str | None = None
    body: bytes | None = None
    headers: tuple[tuple[str, str], ...] | None = None
    created: str | None = None

    @classmethod
    def from_row(cls, values: Mapping[str, Any]) -> RequestedLetter:
        """Convert the used columns of a row.

        :raises SparkOptionError: the sequence is null
        """
        if values[SEQUENCE] is None:
            raise SparkOptionError(f"expected a {SEQUENCE} in every row, found null: drop rows that are no letters")
        created = values.get(STREAM_CREATED)
        if values.get(REPAIRED) is False:
            return cls(values[SEQUENCE], created=created)
        body, headers = values.get(BODY), values.get(HEADERS)
        return cls(
            values[SEQUENCE],
            values.get(SUBJECT),
            body.encode() if isinstance(body, str) else body,
            None if headers is None else tuple((pair["key"] or "", pair["value"] or "") for pair in headers),
            created,
        )

    def repair(self, letter: DeadLetter) -> Repair | None:
        """Return what changes compared with the stored letter; ``None`` where nothing does.

        :raises RepairContractError: a new text has U+FFFD in place of bytes that a frame can't hold
        """
        body = UNCHANGED if self.body is None or self.body == letter.body else self.body
        subject = None if self.subject in (None, as_valid_text(letter.subject)) else self.subject
        if subject is not None and _has_lost_bytes(subject, (letter.subject,)):
            raise _lost_bytes("subject", subject)
        headers = {} if self.headers is None else self._changed_headers(letter)
        if body is UNCHANGED and subject is None and not headers:
            return None
        return Repair(body, headers, subject)

    def _changed_headers(self, letter: DeadLetter) -> dict[str, tuple[str, ...] | None]:
        """Compare headers by name, without those that only the server or a redrive sets."""
        own = [pair for pair in letter.headers if _is_own(pair[0])]
        stored = _by_name(own)
        requested = _by_name(_as_stored([pair for pair in self.headers or () if _is_own(pair[0])], own))
        changed: dict[str, tuple[str, ...] | None] = {}
        for name in dict.fromkeys((*requested, *stored)):
            if requested.get(name, []) == stored.get(name, []):
                continue
            for value in requested.get(name, ()):
                if value not in stored.get(name, ()) and _has_lost_bytes(
                    value, (text for pair in own for text in pair)
                ):
                    raise _lost_bytes(f"header {as_valid_text(name)}", value)
            changed[name] = tuple(requested[name]) if name in requested else None
        return changed


def _is_own(name: str) -> bool:
    return bool(name) and not is_servers(name) and name not in ORIGIN_HEADERS


def _as_stored(requested: Sequence[tuple[str, str]], stored: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Give names and values that a frame shows with U+FFFD the bytes with which they are stored."""
    names: dict[str, str] = {}
    pairs: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, value in stored:
        names.setdefault(as_valid_text(name), name)
        pairs.setdefault((as_valid_text(name), as_valid_text(value)), []).append((name, value))
    found: list[tuple[str, str]] = []
    for name, value in requested:
        # Two of them may look the same: then they are taken in order.
        same = pairs.get((name, value), [(names.get(name, name), value)])
        found.append(same.pop(0) if len(same) > 1 else same[0])
    return found


def _has_lost_bytes(text: str, stored: Iterable[str]) -> bool:
    return "\ufffd" in text and any(as_valid_text(found) != found for found in stored)


def _lost_bytes(part: str, text: str) -> RepairContractError:
    return RepairContractError(
        f"expected the {part} as it was or without bytes that aren't UTF-8, found {text[:80]!r}, where U+FFFD stands"
        " for such bytes: set it to text of your own, or leave it as it is"
    )


def _by_name(headers: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    for name, value in headers:
        values.setdefault(name, []).append(value)
    return values
