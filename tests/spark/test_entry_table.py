"""Entries arrive in tasks as they are in the driver's index, in the order of the jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from hypothesis import strategies as st

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


jobs = st.one_of(st.integers(1, 12), st.integers(1, 2**64 - 1))


PARTITION_SCHEMA = pa.schema(
    [pa.field("sequence", pa.int64(), nullable=False), pa.field("entries", pa.list_(pa.int64()))]
)


@pytest.mark.parametrize(("jobs", "tasks", "expected"), [(0, 4, 0), (1, 4, 1), (7, 3, 3), (9, 3, 3), (1000, 7, 7)])
def test_each_task_gets_its_jobs_in_order(spark: SparkSession, jobs: int, tasks: int, expected: int) -> None:
    expected_sequences = list(range(10, 10 + jobs))
    table = pa.table(
        [expected_sequences, [[sequence, sequence + 1] for sequence in expected_sequences]], schema=PARTITION_SCHEMA
    )

    def collect(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        received = pa.Table.from_batches(unpack_jobs(batches), PARTITION_SCHEMA)
        if received.num_rows:
            yield pa.record_batch([[received.column("sequence").to_pylist()]], names=["sequences"])

    partitions = partition_jobs(spark, table, tasks).mapInArrow(collect, "sequences array<bigint>").collect()
    assert len(partitions) == expected
    assert [sequence for partition in sorted(partitions) for sequence in partition.sequences] == expected_sequences
    assert max((len(partition.sequences) for partition in partitions), default=0) <= -(-jobs // tasks)


def test_the_number_of_tasks_is_a_multiple_of_those_that_run_at_a_time(spark: SparkSession) -> None:
    at_a_time = parallel_tasks(spark)
    assert task_count(spark, 0) == task_count(spark, at_a_time * ROWS_PER_TASK) == at_a_time
    assert task_count(spark, at_a_time * ROWS_PER_TASK + 1) == 2 * at_a_time
