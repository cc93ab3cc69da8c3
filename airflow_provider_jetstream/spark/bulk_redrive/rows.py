"""What tasks are handed: rows of the frame beside what the dead letter queue says about the same letters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_jetstream.jetstream.client.headers import is_servers
from airflow_provider_jetstream.jetstream.redrive.repair import ORIGIN_HEADERS, UNCHANGED, Repair
from airflow_provider_jetstream.spark.dead_letters.entry_table import JOB_SCHEMA, entries_from_columns, unpack_table
from airflow_provider_jetstream.spark.dead_letters.schema import BODY, HEADERS, REPAIRED, SEQUENCE, SUBJECT
from airflow_provider_jetstream.spark.errors import SparkOptionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql.types import StructType

    from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter

# The column in which each task is told what the dead letter queue says about its letters, in a row before theirs.
PACKED_ENTRIES: Final = "told"


class TaskJob(NamedTuple):
    """A letter to be brought back.

    :param row: what the frame says
    :param mentions: what the dead letter queue says
    """

    row: RequestedLetter
    mentions: tuple[Entry, ...]


def read_windows(batches: Iterator[pa.RecordBatch], size: int) -> Iterator[list[TaskJob]]:
    """Take rows in the order in which they come.

    :param batches: of rows
    :param size: how many at a time
    :return: windows
    """
    told = pa.RecordBatch.from_pylist([], JOB_SCHEMA)
    for batch in batches:
        packed = batch.column(PACKED_ENTRIES)
        if packed.null_count < len(packed):
            tables = [unpack_table(value).read_all() for value in packed.drop_null()]
            (told,) = pa.concat_tables(tables).combine_chunks().to_batches()
        rows = batch.filter(packed.is_null()).drop_columns([PACKED_ENTRIES])
        for start in range(0, rows.num_rows, size):
            part = rows.slice(start, size)
            values = zip(*(column.to_pylist() for column in part.columns), strict=True)
            mentions = _mentions(told, part.column(SEQUENCE))
            yield [
                TaskJob(RequestedLetter.of(dict(zip(part.schema.names, row, strict=True))), mentioned)
                for row, mentioned in zip(values, mentions, strict=True)
            ]


def _mentions(told: pa.RecordBatch, sequences: pa.Array) -> list[tuple[Entry, ...]]:
    """Look up what is said about letters; nothing about those that aren't there."""
    places = pc.index_in(sequences.cast(pa.int64()), told.column(SEQUENCE))
    return entries_from_columns([told.column(name).take(places) for name in JOB_SCHEMA.names[1:]])


_TYPES: Final = {
    SEQUENCE: ("bigint", "int"),
    SUBJECT: ("string",),
    BODY: ("binary", "string"),
    HEADERS: ("array<struct<key:string,value:string>>",),
    REPAIRED: ("boolean",),
}


def used_columns(schema: StructType, known: frozenset[str]) -> tuple[str, ...]:
    """Choose the columns that a redrive uses.

    :param schema: of the frame
    :param known: names of columns that tell more about a letter, and aren't used
    :return: names
    :raises SparkOptionError: the sequence is missing, or a column is unknown or of another type
    """
    names = schema.fieldNames()
    if SEQUENCE not in names:
        raise SparkOptionError(
            f"expected a column {SEQUENCE} with the letters' stream sequences, found {', '.join(names) or 'none'}: take"
            " the letters as read_letters gives them"
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
    """What a frame says about one letter; what is ``None`` stays as it is.

    :param sequence: the letter's stream sequence
    :param subject: where the job goes
    :param body: its body
    :param headers: all its headers
    """

    sequence: int
    subject: str | None = None
    body: bytes | None = None
    headers: tuple[tuple[str, str], ...] | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RequestedLetter:
        """Take a row.

        :param values: of the columns that are used
        :return: what it says
        :raises SparkOptionError: it names no letter
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
            None if headers is None else tuple((each["key"] or "", each["value"] or "") for each in headers),
        )

    def repair(self, letter: DeadLetter) -> Repair | None:
        """Say what is to be changed of a letter.

        :param letter: the letter as it is stored
        :return: the repair; ``None`` where nothing is
        """
        body = UNCHANGED if self.body is None or self.body == letter.body else self.body
        subject = None if self.subject is None or self.subject == letter.subject else self.subject
        headers = {} if self.headers is None else self._headers(letter)
        if body is UNCHANGED and subject is None and not headers:
            return None
        return Repair(body, headers, subject)

    def _headers(self, letter: DeadLetter) -> dict[str, tuple[str, ...] | None]:
        """Compare headers by name; those of the server and of redrives aren't the row's to say."""
        asked = _by_name(self.headers or ())
        stored = _by_name(letter.headers)
        changed: dict[str, tuple[str, ...] | None] = {}
        for name in dict.fromkeys((*asked, *stored)):
            if is_servers(name) or name in ORIGIN_HEADERS:
                continue
            # Spark holds nothing but UTF-8.
            shown = [
                value.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for value in stored.get(name, ())
            ]
            if asked.get(name, []) != shown:
                changed[name] = tuple(asked[name]) if name in asked else None
        return changed


def _by_name(headers: tuple[tuple[str, str], ...]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in headers:
        found.setdefault(name, []).append(value)
    return found
