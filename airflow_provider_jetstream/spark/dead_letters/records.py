"""Dead letters as rows, and rows as dead letters."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter, Source
from airflow_provider_jetstream.jetstream.death import Death, Reason
from airflow_provider_jetstream.spark.dead_letters.columns import (
    CIRCULATING,
    GONE,
    IS_PARKED,
    LETTER_SCHEMA,
    LOST,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow_provider_jetstream.jetstream.headers import Pairs

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

_LARGEST = {pa.int32(): 2**31 - 1, pa.int64(): 2**63 - 1}


def batch_of(letters: Sequence[DeadLetter], lost: Sequence[Death] = ()) -> pa.RecordBatch:
    """Write letters as rows.

    :param letters: dead letters
    :param lost: the deaths of jobs whose bodies nobody kept
    :return: a row each
    """
    rows = [*map(_row, letters), *map(_row_of_lost, lost)]
    columns = [pa.array([row.get(field.name) for row in rows], field.type) for field in LETTER_SCHEMA]
    return pa.RecordBatch.from_arrays(columns, schema=LETTER_SCHEMA)


def letter_of(row: Mapping[str, Any]) -> DeadLetter:
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
        kept=row["kept"],
        ready_at=row["ready_at"],
        copied_as=row["copied_as"],
        parked=row["parked"],
    )


def shown(text: str) -> str:
    """Give a text as the columns hold it: with U+FFFD in place of bytes that aren't UTF-8.

    :param text: with such bytes escaped, as headers are read
    :return: text that can be encoded
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            return text.encode("utf-8", "surrogateescape").decode(errors="replace")
        except UnicodeEncodeError:
            return text.encode("utf-8", "replace").decode()
    return text


def shown_pairs(headers: Pairs) -> list[dict[str, str]]:
    """Give headers as their column holds them.

    :param headers: name and value in order
    :return: keys and values in order
    """
    return [{"key": shown(name), "value": shown(value)} for name, value in headers]


def _row(letter: DeadLetter) -> dict[str, Any]:
    origin = letter.origin
    told = {
        "subject": shown(letter.subject),
        "body": letter.body,
        "headers": shown_pairs(letter.headers),
        "first_stored": datetime.fromisoformat(letter.time) if letter.time else None,
        "job_id": shown(letter.job_id),
        "redrive_count": min(letter.redrives, _LARGEST[pa.int64()]),
        "body_source": letter.source.value,
        "state": CIRCULATING if letter.parked is None else IS_PARKED,
        "parked": letter.parked,
        "time": letter.time,
        "entries": letter.entries,
        "kept": letter.kept,
        "ready_at": letter.ready_at,
        "copied_as": letter.copied_as,
    }
    if origin:
        last = _LARGEST[pa.int32()]
        told |= {"dag_id": shown(origin.dag_id), "run_id": shown(origin.run_id), "task_id": shown(origin.task_id)}
        told["map_index"] = max(-1, min(origin.map_index, last))
    return _death(letter.death) | told


def _row_of_lost(death: Death) -> dict[str, Any]:
    return _death(death) | {"body_source": GONE, "state": LOST, "kept": False, "entries": ()}


def _death(death: Death) -> dict[str, Any]:
    return {
        "stream": death.stream,
        "stream_created": death.created,
        "sequence": death.sequence,
        "consumer": _told(death.consumer),
        "reason": death.reason.value,
        "died_at": death.died_at,
        "first_failed_at": death.first_failed_at,
        "deliveries": death.deliveries,
        "explanation": _told(death.explanation),
        "error_class": _told(death.error_class),
        "error_message": _told(death.error_message),
        "traceback_digest": death.traceback_digest,
        "error_place": _told(death.error_place),
        "fingerprint": death.fingerprint,
    }


def _told(text: str | None) -> str | None:
    return None if text is None else shown(text)
