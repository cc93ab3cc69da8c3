"""Columns of a write whose values the server acts on: each becomes a header of its row's message.

Protocol: ``Nats-TTL`` in NATS ADR-43, ``Nats-Schedule`` in NATS ADR-51, the expected sequences in ADR-22.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_jetstream.jetstream.publishing.schedules import SCHEDULE, TARGET
from airflow_provider_jetstream.jetstream.units import parse_seconds
from airflow_provider_jetstream.spark.errors import SparkOptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    Problems = dict[int, str]

_NEVER = "never"


@dataclass(frozen=True)
class ServerColumn:
    """A column that becomes a header.

    :param header: the header
    :param types: of the column, as Spark names them
    :param encode: returns the header's values, null where a row has none, and adds problems by row
    :param needs: the stream's setting without which the server would ignore the header
    :param since: the first server with that setting
    """

    header: str
    types: tuple[str, ...]
    encode: Callable[[pa.Array, Problems], pa.BinaryArray]
    needs: str = ""
    since: str = ""


def require_settings(columns: Collection[str], stream: str, config: Mapping[str, Any]) -> None:
    """Require that a stream heeds the headers that columns become.

    An older server keeps no setting that it doesn't know, and stores the header like any other.

    :param config: the stream's, as the server returns it
    :raises SparkOptionError: a setting is off, or the server doesn't know it
    """
    for name in columns:
        column = SERVER_COLUMNS.get(name)
        if name in (SCHEDULE_COLUMN, TARGET_COLUMN) and config.get("retention") == "workqueue":
            raise SparkOptionError(
                f"expected no column {name} for the work queue {stream}: where a stream takes schedules, whoever may"
                " publish to it can purge it; publish such jobs as Job(body, at=…), which the queue's mover brings, or"
                " leave the column out"
            )
        if column and column.needs and not config.get(column.needs):
            raise SparkOptionError(
                f"expected {column.needs} on {stream} (nats-server {column.since} or later) for the column {name},"
                f" found it off: without it {column.header} has no effect; set it, or leave the column out"
            )


def add_server_headers(lines: pa.BinaryArray, batch: pa.RecordBatch, problems: Problems) -> pa.BinaryArray:
    """Add the headers of a batch's columns to its rows' header lines."""
    for name, column in SERVER_COLUMNS.items():
        if name in batch.schema.names:
            values = column.encode(batch.column(name), problems)
            line = pc.binary_join_element_wise(f"{column.header}: ".encode(), values, b"\r\n", b"")
            lines = pc.binary_join_element_wise(lines, pc.fill_null(line, b""), b"")
    if SCHEDULE_COLUMN in batch.schema.names or TARGET_COLUMN in batch.schema.names:
        _require_pairs(batch, problems)
    return lines


def _require_pairs(batch: pa.RecordBatch, problems: Problems) -> None:
    columns = [
        batch.column(name) if name in batch.schema.names else pa.nulls(batch.num_rows)
        for name in (SCHEDULE_COLUMN, TARGET_COLUMN)
    ]
    for row in _rows(pc.xor(*map(pc.is_valid, columns))):
        problems.setdefault(row, f"it has only one of {SCHEDULE_COLUMN} and {TARGET_COLUMN}: a schedule needs both")


def _encode_ttl(column: pa.Array, problems: Problems) -> pa.BinaryArray:
    values = pc.unique(column).to_pylist()
    encoded: list[bytes | None] = []
    for value in values:
        problem = None
        try:
            # The server counts whole seconds.
            encoded.append(value if value is None else _NEVER.encode() if value == _NEVER else _seconds(value))
        except ValueError as error:
            problem = f"its ttl can't be used: {error}"
            encoded.append(None)
        if problem:
            for row in _rows(pc.fill_null(pc.equal(column, value), fill_value=False)):
                problems.setdefault(row, problem)
    indexes = pc.index_in(column, pa.array(values, column.type))
    return pa.array(encoded, pa.binary()).take(indexes)


def _seconds(value: str | int) -> bytes:
    seconds = math.ceil(parse_seconds(value))
    if seconds < 1:
        raise ValueError(f'expected at least 1 s, or "never", found {value!r}')
    return b"%ds" % seconds


def _encode_schedule(column: pa.Array, problems: Problems) -> pa.BinaryArray:
    if pa.types.is_timestamp(column.type):
        column = pc.strftime(column.cast(pa.timestamp("us")), "@at %Y-%m-%dT%H:%M:%SZ")
    return _encode_text(SCHEDULE_COLUMN)(column, problems)


def _encode_text(name: str) -> Callable[[pa.Array, Problems], pa.BinaryArray]:
    def encode(column: pa.Array, problems: Problems) -> pa.BinaryArray:
        values = column.cast(pa.binary())
        wrong = pc.or_(pc.equal(pc.binary_length(values), 0), pc.match_substring_regex(values, "[\r\n]"))
        for row in _rows(pc.fill_null(wrong, fill_value=False)):
            problems.setdefault(row, f"its {name} is empty or has more than one line")
        return values

    return encode


def _encode_sequence(name: str) -> Callable[[pa.Array, Problems], pa.BinaryArray]:
    def encode(column: pa.Array, problems: Problems) -> pa.BinaryArray:
        for row in _rows(pc.fill_null(pc.less(column, 0), fill_value=False)):
            problems.setdefault(row, f"its {name} is {column[row]}: expected a sequence, or 0 for none")
        return column.cast(pa.string()).cast(pa.binary())

    return encode


def _rows(mask: pa.BooleanArray) -> list[int]:
    return np.flatnonzero(np.asarray(mask)).tolist()


SCHEDULE_COLUMN: Final = "schedule"
TARGET_COLUMN: Final = "schedule_target"
_LAST: Final = "expected_last_sequence"
_LAST_OF_SUBJECT: Final = "expected_last_subject_sequence"
_NUMBERS: Final = ("bigint", "int")

SERVER_COLUMNS: Final[Mapping[str, ServerColumn]] = {
    "ttl": ServerColumn("Nats-TTL", ("string", *_NUMBERS), _encode_ttl, "allow_msg_ttl", "2.11"),
    SCHEDULE_COLUMN: ServerColumn(SCHEDULE, ("string", "timestamp"), _encode_schedule, "allow_msg_schedules", "2.12"),
    TARGET_COLUMN: ServerColumn(TARGET, ("string",), _encode_text(TARGET_COLUMN), "allow_msg_schedules", "2.12"),
    _LAST: ServerColumn("Nats-Expected-Last-Sequence", _NUMBERS, _encode_sequence(_LAST)),
    _LAST_OF_SUBJECT: ServerColumn("Nats-Expected-Last-Subject-Sequence", _NUMBERS, _encode_sequence(_LAST_OF_SUBJECT)),
}
