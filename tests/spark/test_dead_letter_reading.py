from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from letter_queue import KEYED, mixed_queue

from airflow_provider_jetstream.jetstream import (
    DeadLetter,
    Death,
    Findings,
    Origin,
    Reason,
    Selection,
    connect,
    connection_settings,
    find_dead_letters,
)
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource
from airflow_provider_jetstream.spark import read_letters
from airflow_provider_jetstream.spark.dead_letters.schema import as_valid_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.nats_server import NatsServer


def find(server: NatsServer, queue: WorkQueue, select: Selection | None = None) -> Findings:
    async def find_async() -> Findings:
        async with connect(connection_settings({"servers": (server.url,), "timeout": 5})) as connection:
            return await find_dead_letters(connection, queue, select)

    return asyncio.run(find_async())


def letter_from_row(row: Mapping[str, Any]) -> DeadLetter:
    """Convert a row, whose times are aware, to a letter; bytes that aren't UTF-8 were lost in the row."""
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
        source=BodySource(row["body_source"]),
        entries=tuple(row["entries"]),
        preserved=row["kept"],
        ready_at=row["ready_at"],
        copy_sequence=row["copied_as"],
        parked=row["parked"],
        origin=None
        if row["dag_id"] is None
        else Origin(row["dag_id"], row["run_id"], row["task_id"], row["map_index"]),
    )


def letters_of(frame: DataFrame) -> list[DeadLetter]:
    rows = [row.asDict(recursive=True) for row in frame.orderBy("sequence").collect()]
    for row in rows:
        for name, value in row.items():
            # Spark returns times in its session's zone, which is UTC here, without a zone.
            row[name] = value.replace(tzinfo=UTC) if isinstance(value, datetime) else value
    return [letter_from_row(row) for row in rows]


def as_valid(letters: tuple[DeadLetter, ...]) -> list[DeadLetter]:
    """Return letters as Spark has them: no scan of its own says how long each is kept, which no policy asks there."""
    return [
        replace(
            letter,
            headers=tuple((as_valid_text(name), as_valid_text(value)) for name, value in letter.headers),
            kept_since=None,
        )
        for letter in letters
    ]


@pytest.fixture(scope="module")
def mixed(nats: NatsServer) -> WorkQueue:
    return asyncio.run(mixed_queue(nats, "mixedletters"))


@pytest.mark.parametrize(
    "select",
    [
        {},
        {"parked": True},
        {"reasons": frozenset(Reason), "unaccounted": True},
        {"error_class": "printing.PaperError"},
        {"dag_id": "prints/nightly", "sequences": [4, 5, 11, 12, 13]},
        {"dag_id": KEYED.dag_id, "run_id": KEYED.run_id, "task_id": KEYED.task_id},
        {"older_than": "1h"},
    ],
)
def test_spark_reads_the_letters_that_a_scan_finds(
    spark: SparkSession, nats: NatsServer, mixed: WorkQueue, select: dict[str, Any]
) -> None:
    expected = as_valid(find(nats, mixed, Selection.of(select)).letters)
    letters = letters_of(read_letters(spark, mixed.name, {"servers": nats.url}, select))
    assert letters == expected
