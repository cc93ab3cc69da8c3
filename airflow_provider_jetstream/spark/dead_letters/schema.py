"""The columns of dead letters and of repaired letters, and dead letters as rows.

Reading, repair and redrive agree on these names.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.publishing.job import job_id_of, redrives_of
from airflow_provider_jetstream.spark.source.bulk_parser import HEADERS as HEADERS_TYPE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.client.headers import Pairs
    from airflow_provider_jetstream.jetstream.dead_letters.death import Death
    from airflow_provider_jetstream.jetstream.dead_letters.letter import (
        DeadLetter,
    )
    from airflow_provider_jetstream.jetstream.origin import Origin


SEQUENCE: Final = "sequence"
SUBJECT: Final = "subject"
BODY: Final = "body"
HEADERS: Final = "headers"
REASON: Final = "reason"
CONSUMER: Final = "consumer"
DELIVERIES: Final = "deliveries"
EXPLANATION: Final = "explanation"
ERROR_CLASS: Final = "error_class"
ERROR_MESSAGE: Final = "error_message"
TRACEBACK_DIGEST: Final = "traceback_digest"
ERROR_PLACE: Final = "error_place"
FINGERPRINT: Final = "fingerprint"
FIRST_STORED: Final = "first_stored"
FIRST_FAILED_AT: Final = "first_failed_at"
DIED_AT: Final = "died_at"
JOB_ID: Final = "job_id"
DAG_ID: Final = "dag_id"
RUN_ID: Final = "run_id"
TASK_ID: Final = "task_id"
MAP_INDEX: Final = "map_index"
REDRIVE_COUNT: Final = "redrive_count"
BODY_SOURCE: Final = "body_source"
STATE: Final = "state"
PARKED: Final = "parked"
# Columns that only a redrive needs.
STREAM: Final = "stream"
STREAM_CREATED: Final = "stream_created"
TIME: Final = "time"
ENTRIES: Final = "entries"
KEPT: Final = "kept"
READY_AT: Final = "ready_at"
COPIED_AS: Final = "copied_as"

# Of a repaired frame only: whether the repair changed the row.
REPAIRED: Final = "repaired"

# Values of ``body_source``.
FROM_QUEUE: Final = "queue"
FROM_COPY: Final = "copy"
FROM_ARCHIVE: Final = "archive"
GONE: Final = "gone"

# Values of ``state``; a lost letter has no body, and its ``body_source`` is ``gone``.
CIRCULATING: Final = "circulating"
IS_PARKED: Final = "parked"
LOST: Final = "lost"

_TIME_TYPE = pa.timestamp("us", "UTC")

LETTER_SCHEMA: Final = pa.schema(
    [
        pa.field(SEQUENCE, pa.int64(), nullable=False),
        pa.field(SUBJECT, pa.string()),
        pa.field(BODY, pa.binary()),
        pa.field(HEADERS, HEADERS_TYPE),
        pa.field(REASON, pa.string()),
        pa.field(CONSUMER, pa.string()),
        pa.field(DELIVERIES, pa.int64()),
        pa.field(EXPLANATION, pa.string()),
        pa.field(ERROR_CLASS, pa.string()),
        pa.field(ERROR_MESSAGE, pa.string()),
        pa.field(TRACEBACK_DIGEST, pa.string()),
        pa.field(ERROR_PLACE, pa.string()),
        pa.field(FINGERPRINT, pa.string()),
        pa.field(FIRST_STORED, _TIME_TYPE),
        pa.field(FIRST_FAILED_AT, _TIME_TYPE),
        pa.field(DIED_AT, _TIME_TYPE),
        pa.field(JOB_ID, pa.string()),
        pa.field(DAG_ID, pa.string()),
        pa.field(RUN_ID, pa.string()),
        pa.field(TASK_ID, pa.string()),
        pa.field(MAP_INDEX, pa.int32()),
        pa.field(REDRIVE_COUNT, pa.int64()),
        pa.field(BODY_SOURCE, pa.string()),
        pa.field(STATE, pa.string()),
        pa.field(PARKED, pa.string()),
        pa.field(STREAM, pa.string()),
        pa.field(STREAM_CREATED, pa.string()),
        pa.field(TIME, pa.string()),
        pa.field(ENTRIES, pa.list_(pa.int64())),
        pa.field(KEPT, pa.bool_()),
        pa.field(READY_AT, _TIME_TYPE),
        pa.field(COPIED_AS, pa.int64()),
    ]
)

# The columns that a repair may change; any other change or addition is refused.
CHANGEABLE: Final = (SUBJECT, BODY, HEADERS)
# The result of a repair and the input of a bulk redrive: ``headers`` as array<struct<key,value>>, ``repaired`` as
# boolean, and the stream's creation, since a sequence means something in one incarnation of a stream only.
REPAIR_COLUMNS: Final = (SEQUENCE, *CHANGEABLE, REPAIRED, STREAM_CREATED)
# Beside these in what a repair writes: what is wrong with a row, null where nothing is.
PROBLEM: Final = "_problem"

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

# The same columns as DDL, for data frames.
LETTER_DDL: Final = ", ".join(f"{field.name} {_DDL.get(field.type, _HEADERS)}" for field in LETTER_SCHEMA)

_DEATH_COLUMNS = (DELIVERIES, EXPLANATION, ERROR_CLASS, ERROR_MESSAGE, TRACEBACK_DIGEST, ERROR_PLACE, FINGERPRINT)
_LARGEST = {pa.int32(): 2**31 - 1, pa.int64(): 2**63 - 1}


def letter_batch(letters: Sequence[DeadLetter], lost: Sequence[Death] = ()) -> pa.RecordBatch:
    """Convert letters to rows; ``lost`` are the deaths of jobs whose bodies weren't preserved."""
    rows = [*map(_row, letters), *map(_row_of_lost, lost)]
    columns = zip(*rows, strict=True) if rows else ([] for _ in LETTER_SCHEMA)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, LETTER_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=LETTER_SCHEMA)


def as_valid_text(text: str) -> str:
    """Replace escaped bytes that aren't UTF-8, as headers may contain, by U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            return text.encode("utf-8", "surrogateescape").decode(errors="replace")
        except UnicodeEncodeError:
            return readable_text(text)
    return text


def header_pairs(headers: Pairs) -> list[dict[str, str]]:
    """Convert headers to the values of their column."""
    # Lines without a name are no headers for any client.
    return [{"key": as_valid_text(name), "value": as_valid_text(value)} for name, value in headers if name]


def header_values(headers: Pairs, body: bytes, sequence: int, origin: Origin | None) -> tuple[Any, ...]:
    """Return the values of the columns read from a job's headers: headers, job id, the origin's four, redrive count."""
    task: tuple[Any, ...] = (None, None, None, None)
    if origin:
        index = max(-1, min(origin.map_index, _LARGEST[pa.int32()]))
        task = (as_valid_text(origin.dag_id), as_valid_text(origin.run_id), as_valid_text(origin.task_id), index)
    redrives = min(redrives_of(headers), _LARGEST[pa.int64()])
    return header_pairs(headers), as_valid_text(job_id_of(headers, body, sequence)), *task, redrives


def _row(letter: DeadLetter) -> tuple[Any, ...]:
    """Return the values in the order of the schema: mappings would cost more than everything else here."""
    sequence, consumer, *details = _death_values(letter.death)
    pairs, *source = header_values(letter.headers, letter.body, sequence, letter.origin)
    return (
        sequence,
        as_valid_text(letter.subject),
        letter.body,
        pairs,
        letter.death.reason.value,
        consumer,
        *details,
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
        # A job of another queue has no sequence here.
        0 if letter.copy_stream else letter.copy_sequence,
    )


def _row_of_lost(death: Death) -> tuple[Any, ...]:
    sequence, consumer, *details = _death_values(death)
    values = {
        SEQUENCE: sequence,
        REASON: death.reason.value,
        CONSUMER: consumer,
        **dict(zip(_DEATH_COLUMNS, details, strict=True)),
        FIRST_FAILED_AT: death.first_failed_at,
        DIED_AT: death.died_at,
        STREAM: death.stream,
        STREAM_CREATED: death.created,
        BODY_SOURCE: GONE,
        STATE: LOST,
        KEPT: False,
        ENTRIES: (),
    }
    return tuple(values.get(field.name) for field in LETTER_SCHEMA)


def _death_values(death: Death) -> tuple[Any, ...]:
    """Return sequence, consumer, and the values of ``_DEATH_COLUMNS``."""
    return (
        death.sequence,
        _valid_or_none(death.consumer),
        death.deliveries,
        _valid_or_none(death.explanation),
        _valid_or_none(death.error_class),
        _valid_or_none(death.error_message),
        death.traceback_digest,
        _valid_or_none(death.error_place),
        death.fingerprint,
    )


def _valid_or_none(text: str | None) -> str | None:
    return None if text is None else as_valid_text(text)
