"""Jobs are divided among tasks, and arrive whole and in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from airflow_provider_jetstream.spark.dead_letters.entry_table import (
    ROWS_PER_TASK,
    parallel_tasks,
    partition_jobs,
    task_count,
    unpack_jobs,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

SCHEMA = pa.schema([pa.field("sequence", pa.int64(), nullable=False), pa.field("entries", pa.list_(pa.int64()))])


@pytest.mark.parametrize(("jobs", "tasks", "expected"), [(0, 4, 0), (1, 4, 1), (7, 3, 3), (9, 3, 3), (1000, 7, 7)])
def test_each_task_is_given_its_part(spark: SparkSession, jobs: int, tasks: int, expected: int) -> None:
    sequences = list(range(10, 10 + jobs))
    table = pa.table([sequences, [[each, each + 1] for each in sequences]], schema=SCHEMA)

    def seen(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = pa.Table.from_batches(unpack_jobs(batches), SCHEMA)
        if found.num_rows:
            yield pa.record_batch([[found.column("sequence").to_pylist()]], names=["sequences"])

    parts = partition_jobs(spark, table, tasks).mapInArrow(seen, "sequences array<bigint>").collect()
    assert len(parts) == expected
    assert [each for part in sorted(parts) for each in part.sequences] == sequences
    assert max((len(part.sequences) for part in parts), default=0) <= -(-jobs // tasks)


def test_as_many_tasks_as_run_at_a_time_or_a_multiple(spark: SparkSession) -> None:
    at_a_time = parallel_tasks(spark)
    assert task_count(spark, 0) == task_count(spark, at_a_time * ROWS_PER_TASK) == at_a_time
    assert task_count(spark, at_a_time * ROWS_PER_TASK + 1) == 2 * at_a_time
