"""What is said about jobs on its way to tasks: one row of a frame for each task.

As rows of their own, jobs would be serialised by the JVM for every action, sampled for their ranges and shuffled, which
took more of its time than the letters that come back.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.utils import is_remote

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import DataFrame, SparkSession

# Some seconds of work: what is lost where a task is tried again.
ROWS_PER_TASK = 20_000


def parallel_tasks(session: SparkSession) -> int:
    """Tell how many tasks run at a time.

    :param session: Spark
    :return: how many; two where it doesn't tell
    """
    # Spark Connect doesn't tell; fewer tasks than there could be at a time do no harm.
    return 2 if is_remote() else max(1, session.sparkContext.defaultParallelism)


def task_count(session: SparkSession, jobs: int) -> int:
    """Tell among how many tasks jobs are divided: a last one alone would leave the other slots idle.

    :param session: Spark
    :param jobs: how many there are
    :return: as many as run at a time, or twice, or three times as many
    """
    at_a_time = parallel_tasks(session)
    return at_a_time * max(1, ceil(jobs / ROWS_PER_TASK / at_a_time))


def partition_jobs(session: SparkSession, jobs: pa.Table, tasks: int) -> DataFrame:
    """Divide jobs.

    :param session: Spark
    :param jobs: in order
    :param tasks: among how many tasks
    :return: a partition for each task, with what :func:`jobs_of` takes
    """
    each = max(1, ceil(jobs.num_rows / tasks))
    parts = [pack_table(jobs.slice(start, each)) for start in range(0, jobs.num_rows, each)]
    table = pa.table({"task": pa.array(range(len(parts)), pa.int32()), "jobs": pa.array(parts, pa.binary())})
    return session.createDataFrame(table).repartitionById(max(1, len(parts)), "task")


def unpack_jobs(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Take a task's jobs.

    :param batches: of the frame that :func:`shared_out` made
    :return: the jobs in order
    """
    for batch in batches:
        for value in batch.column("jobs"):
            yield from unpack_table(value)


def unpack_table(value: pa.BinaryScalar) -> pa.RecordBatchReader:
    """Take jobs out of one value.

    :param value: as :func:`packed` made it
    :return: the jobs in order
    """
    return pa.ipc.open_stream(value.as_buffer())


def pack_table(jobs: pa.Table) -> bytes:
    """Put what is said about jobs into one value.

    :param jobs: in order
    :return: the value
    """
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, jobs.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(jobs.combine_chunks())
    value: bytes = sink.getvalue().to_pybytes()
    return value
