"""The Spark job of a bulk redrive: the frame's rows and the entries about them, divided by sequence, and watched."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING
from uuid import uuid4

import numpy as np
import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import functions as f
from pyspark.sql.utils import is_remote

from airflow_provider_jetstream.jetstream.errors import RedriveError
from airflow_provider_jetstream.spark.bulk_redrive.outcomes import OUTCOME_DDL
from airflow_provider_jetstream.spark.bulk_redrive.rows import PACKED_ENTRIES
from airflow_provider_jetstream.spark.dead_letters.entry_table import pack_table, parallel_tasks, task_count
from airflow_provider_jetstream.spark.dead_letters.schema import SEQUENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from airflow_provider_jetstream.spark.bulk_redrive.task import RedriveTask

# Each has up to 256 requests in flight, and the server drops its whole queue of API requests at ten thousand.
MOST_TASKS = 32
# Letters a second that a task does easily, and compared with which the burst at its start is small.
_RATE_PER_TASK = 50
_TICK = 0.2


def tasks_for(session: SparkSession, letters: int, *, rate: float | None, requested: int | None) -> int:
    """Return among how many tasks letters are divided.

    :param rate: letters a second of all tasks, which then have to run at the same time
    :param requested: the most tasks, where the user limits them
    """
    at_a_time = min(parallel_tasks(session), MOST_TASKS)
    if rate is not None:
        return min(requested or at_a_time, at_a_time, max(1, int(rate // _RATE_PER_TASK)))
    return requested or min(MOST_TASKS // at_a_time * at_a_time, task_count(session, letters))


def rate_per_task(rate: float, tasks: int) -> float:
    """Return the rate of each of several tasks: as many whole letters in ten seconds as all of them may have."""
    return rate if tasks == 1 else 10 * rate // tasks / 10


def partition_letters(letters: DataFrame, columns: Sequence[str], jobs: pa.Table, tasks: int) -> DataFrame:
    """Divide a frame's rows by ranges of sequences, and add the entries about them.

    :param columns: the frame's columns that are used
    :param jobs: the jobs' entries, a row per job
    :return: the rows in the order of the jobs; those of a task begin with one that has only the entries of its letters,
        packed, in the column ``PACKED_ENTRIES``
    """
    # By bounds that are known here: Spark would evaluate the frame twice to find its own.
    known = jobs.column(SEQUENCE).to_numpy()
    bounds = sorted({int(known[len(known) * task // tasks]) for task in range(1, tasks)}) if len(known) else []
    edges = [0, *np.searchsorted(known, bounds).tolist(), len(known)]
    slices = [jobs.slice(low, high - low) for low, high in pairwise(edges) if high > low]
    # Not a value per row: Spark would have to serialise, to shuffle and to join as many rows again.
    firsts = pa.array([jobs_of_task.column(SEQUENCE)[0].as_py() for jobs_of_task in slices], pa.int64())
    entries = pa.table({SEQUENCE: firsts, PACKED_ENTRIES: pa.array(map(pack_table, slices), pa.binary())})
    entry_rows = letters.sparkSession.createDataFrame(entries)
    rows = letters.select(*columns).unionByName(entry_rows, allowMissingColumns=True)
    task = f.expr(f"size(filter(array({', '.join(f'{bound}L' for bound in bounds)}), bound -> bound <= {SEQUENCE}))")
    by_range = rows.repartitionById(len(bounds) + 1, task.cast("int")) if bounds else rows.coalesce(1)
    return by_range.sortWithinPartitions(f.col(PACKED_ENTRIES).isNull(), SEQUENCE)


def run_watched(rows: DataFrame, task: RedriveTask, tick: Callable[[Callable[[], None]], None]) -> pa.Table:
    """Run the job, and return the outcomes of all letters.

    :param tick: called a few times a second with a function that stops the job
    :raises RedriveError: Spark gave up, or the job was stopped
    """
    session, tag = rows.sparkSession, f"redrive-{uuid4().hex}"

    def run_task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return task.run(batches)

    def run_job() -> pa.Table:
        if is_remote():
            session.addTag(tag)
        else:
            # For this thread only; the thread in which Spark serves the result inherits a job group, but no tag.
            session.sparkContext.setJobGroup(tag, f"redrive {task.request.run}", interruptOnCancel=True)
        return rows.mapInArrow(run_task, OUTCOME_DDL).toArrow()

    def stop() -> None:
        if is_remote():
            session.interruptTag(tag)
        else:
            session.sparkContext.cancelJobGroup(tag)

    with ThreadPoolExecutor(1) as thread:
        job = thread.submit(run_job)
        try:
            while not job.done():
                time.sleep(_TICK)
                tick(stop)
        finally:
            if not job.done():
                stop()
        try:
            return job.result()
        except (PySparkException, Py4JError) as error:
            # Which of the two it is depends on how Spark collects the result.
            cause = str(error).partition("\n\tat ")[0]
            raise RedriveError(
                f"Spark gave up the redrive {task.request.run}: {cause}; the letters done so far are done, and running"
                " it again under the same key resumes it"
            ) from error
