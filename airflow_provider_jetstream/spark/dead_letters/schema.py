"""The columns of dead letters and of repaired letters: names on which reading, repair and redrive agree."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from airflow_provider_jetstream.spark.wire.bulk_headers import HEADERS as HEADERS_TYPE

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
