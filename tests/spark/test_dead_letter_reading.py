from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from letter_queue import KEYED, mixed_queue

from airflow_provider_jetstream.jetstream import (
    Findings,
    Reason,
    Selection,
    connect,
    connection_settings,
    find_dead_letters,
)
from airflow_provider_jetstream.spark import read_letters
from airflow_provider_jetstream.spark.dead_letters.schema import as_valid_text, letter_from_row

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from airflow_provider_jetstream.jetstream import DeadLetter, WorkQueue
    from testbed.nats_server import NatsServer


def find(server: NatsServer, queue: WorkQueue, select: Selection | None = None) -> Findings:
    async def find_async() -> Findings:
        async with connect(connection_settings({"servers": (server.url,), "timeout": 5})) as connection:
            return await find_dead_letters(connection, queue, select)

    return asyncio.run(find_async())


def letters_of(frame: DataFrame) -> list[DeadLetter]:
    rows = [row.asDict(recursive=True) for row in frame.orderBy("sequence").collect()]
    for row in rows:
        for name, value in row.items():
            # Spark returns times in its session's zone, which is UTC here, without a zone.
            row[name] = value.replace(tzinfo=UTC) if isinstance(value, datetime) else value
    return [letter_from_row(row) for row in rows]


def as_valid(letters: tuple[DeadLetter, ...]) -> list[DeadLetter]:
    return [
        replace(letter, headers=tuple((as_valid_text(name), as_valid_text(value)) for name, value in letter.headers))
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
