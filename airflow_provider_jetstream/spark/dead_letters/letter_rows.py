"""Dead letters as rows, and rows as dead letters."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
from airflow_provider_jetstream.jetstream.dead_letters.letter import (
    DeadLetter,
    Source,
    job_id_of,
    origin_of,
    redrives_of,
)
from airflow_provider_jetstream.spark.dead_letters.schema import (
    BODY_SOURCE,
    CIRCULATING,
    CONSUMER,
    DELIVERIES,
    DIED_AT,
    ENTRIES,
    ERROR_CLASS,
    ERROR_MESSAGE,
    ERROR_PLACE,
    EXPLANATION,
    FINGERPRINT,
    FIRST_FAILED_AT,
    GONE,
    IS_PARKED,
    KEPT,
    LETTER_SCHEMA,
    LOST,
    REASON,
    SEQUENCE,
    STATE,
    STREAM,
    STREAM_CREATED,
    TRACEBACK_DIGEST,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.headers import Pairs

_DDL = {
    pa.int64(): "bigint",
    pa.int32(): "int",
    pa.string(): "string",
    pa.binary(): "binary",
    pa.bool_(): "boolean",
    pa.timestamp("us", "UTC"): "timestamp",
    pa.list_(pa.int64()): "array<bigint>",
}
_HEADERS = "array<struct<key:string,value:string>>"

# For data frames: the same columns in Spark's language.
LETTER_DDL: Final = ", ".join(f"{field.name} {_DDL.get(field.type, _HEADERS)}" for field in LETTER_SCHEMA)

_TOLD = (DELIVERIES, EXPLANATION, ERROR_CLASS, ERROR_MESSAGE, TRACEBACK_DIGEST, ERROR_PLACE, FINGERPRINT)
_LARGEST = {pa.int32(): 2**31 - 1, pa.int64(): 2**63 - 1}


def letter_batch(letters: Sequence[DeadLetter], lost: Sequence[Death] = ()) -> pa.RecordBatch:
    """Write letters as rows.

    :param letters: dead letters
    :param lost: the deaths of jobs whose bodies nobody kept
    :return: a row each
    """
    rows = [*map(_row, letters), *map(_row_of_lost, lost)]
    columns = zip(*rows, strict=True) if rows else ([] for _ in LETTER_SCHEMA)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, LETTER_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=LETTER_SCHEMA)


def letter_from_row(row: Mapping[str, Any]) -> DeadLetter:
    """Read a row that :func:`batch_of` wrote, but for what its text columns couldn't hold.

    :param row: by column; times are aware
    :return: the dead letter
    """
    death = Death(
        stream=row["stream"],
        created=row["stream_created"],
        sequence=row["sequence"],
        consumer=row["consumer"],
        reason=Reason(row["reason"]),
        died_at=row["died_at"],
        first_failed_at=row["first_failed_at"],
        deliveries=row["deliveries"],
        explanation=row["explanation"],
        error_class=row["error_class"],
        error_message=row["error_message"],
        traceback_digest=row["traceback_digest"],
        error_place=row["error_place"],
    )
    return DeadLetter(
        death=death,
        subject=row["subject"],
        body=bytes(row["body"]),
        headers=tuple((pair["key"], pair["value"]) for pair in row["headers"]),
        time=row["time"],
        source=Source(row["body_source"]),
        entries=tuple(row["entries"]),
        preserved=row["kept"],
        ready_at=row["ready_at"],
        copy_sequence=row["copied_as"],
        parked=row["parked"],
    )


def as_valid_text(text: str) -> str:
    """Give a text as the columns hold it: with U+FFFD in place of bytes that aren't UTF-8.

    :param text: with such bytes escaped, as headers are read
    :return: text that can be encoded
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            return text.encode("utf-8", "surrogateescape").decode(errors="replace")
        except UnicodeEncodeError:
            return text.encode("utf-8", "replace").decode()
    return text


def header_pairs(headers: Pairs) -> list[dict[str, str]]:
    """Give headers as their column holds them.

    :param headers: name and value in order
    :return: keys and values in order
    """
    return [{"key": as_valid_text(name), "value": as_valid_text(value)} for name, value in headers]


def header_values(headers: Pairs, sequence: int) -> tuple[Any, ...]:
    """Give what a job's headers tell, for the columns ``HEADERS``, ``JOB_ID``, those of its origin, and the redrives.

    :param headers: the job's
    :param sequence: its stream sequence
    :return: the columns' values in this order
    """
    origin: tuple[Any, ...] = (None, None, None, None)
    if found := origin_of(headers):
        index = max(-1, min(found.map_index, _LARGEST[pa.int32()]))
        origin = (as_valid_text(found.dag_id), as_valid_text(found.run_id), as_valid_text(found.task_id), index)
    redrives = min(redrives_of(headers), _LARGEST[pa.int64()])
    return header_pairs(headers), as_valid_text(job_id_of(headers, sequence)), *origin, redrives


def _row(letter: DeadLetter) -> tuple[Any, ...]:
    """Give the columns' values in the order of the schema: rows as mappings would cost more than all else here."""
    sequence, consumer, *told = _death(letter.death)
    pairs, *source = header_values(letter.headers, sequence)
    return (
        sequence,
        as_valid_text(letter.subject),
        letter.body,
        pairs,
        letter.death.reason.value,
        consumer,
        *told,
        datetime.fromisoformat(letter.time) if letter.time else None,
        letter.death.first_failed_at,
        letter.death.died_at,
        *source,
        letter.source.value,
        CIRCULATING if letter.parked is None else IS_PARKED,
        letter.parked,
        letter.death.stream,
        letter.death.created,
        letter.time,
        letter.entries,
        letter.preserved,
        letter.ready_at,
        letter.copy_sequence,
    )


def _row_of_lost(death: Death) -> tuple[Any, ...]:
    sequence, consumer, *told = _death(death)
    known = {
        SEQUENCE: sequence,
        REASON: death.reason.value,
        CONSUMER: consumer,
        **dict(zip(_TOLD, told, strict=True)),
        FIRST_FAILED_AT: death.first_failed_at,
        DIED_AT: death.died_at,
        STREAM: death.stream,
        STREAM_CREATED: death.created,
        BODY_SOURCE: GONE,
        STATE: LOST,
        KEPT: False,
        ENTRIES: (),
    }
    return tuple(known.get(field.name) for field in LETTER_SCHEMA)


def _death(death: Death) -> tuple[Any, ...]:
    """Give what both kinds of rows tell of a death: sequence, consumer, and what ``_TOLD`` names."""
    return (
        death.sequence,
        _told(death.consumer),
        death.deliveries,
        _told(death.explanation),
        _told(death.error_class),
        _told(death.error_message),
        death.traceback_digest,
        _told(death.error_place),
        death.fingerprint,
    )


def _told(text: str | None) -> str | None:
    return None if text is None else as_valid_text(text)
