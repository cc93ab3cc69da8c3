"""The Spark job of a bulk redrive: the frame beside what is known of its letters, divided by sequences, and watched."""

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

# Each has up to 256 requests on their way, and the server drops its whole queue of API requests at ten thousand.
MOST_TASKS = 32
# Letters a second that a task does easily, and with which the burst that each may begin with weighs little.
_RATE_OF_A_TASK = 50
_TICK = 0.2


def tasks_for(session: SparkSession, letters: int, *, rate: float | None, asked: int | None) -> int:
    """Tell among how many tasks letters are divided.

    :param session: Spark
    :param letters: how many there may be
    :param rate: letters a second of all tasks, which then have to run at the same time
    :param asked: how many at most, where somebody says so
    :return: how many
    """
    at_a_time = min(parallel_tasks(session), MOST_TASKS)
    if rate is not None:
        return min(asked or at_a_time, at_a_time, max(1, int(rate // _RATE_OF_A_TASK)))
    return asked or min(MOST_TASKS // at_a_time * at_a_time, task_count(session, letters))


def partition_letters(letters: DataFrame, columns: Sequence[str], jobs: pa.Table, tasks: int) -> DataFrame:
    """Put what is said about letters beside the frame's rows, and divide them by ranges of sequences.

    :param letters: the frame
    :param columns: which of its columns are used
    :param jobs: what the dead letter queue says about which jobs
    :param tasks: among how many tasks
    :return: rows in the order of the jobs; those of a task begin with one that holds nothing but what is said about its
        letters, packed, in the column ``TOLD``
    """
    # By bounds that are known here: Spark would evaluate the frame twice to find its own.
    known = jobs.column(SEQUENCE).to_numpy()
    bounds = sorted({int(known[len(known) * part // tasks]) for part in range(1, tasks)}) if len(known) else []
    edges = [0, *np.searchsorted(known, bounds).tolist(), len(known)]
    parts = [jobs.slice(low, high - low) for low, high in pairwise(edges) if high > low]
    # Not beside each row: Spark would have to serialise, to shuffle and to join as many rows again.
    firsts = pa.array([part.column(SEQUENCE)[0].as_py() for part in parts], pa.int64())
    told = pa.table({SEQUENCE: firsts, PACKED_ENTRIES: pa.array(map(pack_table, parts), pa.binary())})
    rows = letters.select(*columns).unionByName(letters.sparkSession.createDataFrame(told), allowMissingColumns=True)
    place = f.expr(f"size(filter(array({', '.join(f'{each}L' for each in bounds)}), bound -> bound <= {SEQUENCE}))")
    by_range = rows.repartitionById(len(bounds) + 1, place.cast("int")) if bounds else rows.coalesce(1)
    return by_range.sortWithinPartitions(f.col(PACKED_ENTRIES).isNull(), SEQUENCE)


def run_watched(rows: DataFrame, share: RedriveTask, tick: Callable[[Callable[[], None]], None]) -> pa.Table:
    """Run the job.

    :param rows: what tasks are handed
    :param share: what each does
    :param tick: called a few times a second with what stops the job at once
    :return: what became of the letters
    :raises RedriveError: Spark gave it up, or it was stopped
    """
    session, tag = rows.sparkSession, f"redrive-{uuid4().hex}"

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return share.run(batches)

    def job() -> pa.Table:
        if is_remote():
            session.addTag(tag)
        else:
            # For this thread only; the one in which Spark serves the result takes it over, unlike a tag.
            session.sparkContext.setJobGroup(tag, f"redrive {share.request.run}", interruptOnCancel=True)
        return rows.mapInArrow(work, OUTCOME_DDL).toArrow()

    def stop() -> None:
        if is_remote():
            session.interruptTag(tag)
        else:
            session.sparkContext.cancelJobGroup(tag)

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(job)
        try:
            while not running.done():
                time.sleep(_TICK)
                tick(stop)
        finally:
            if not running.done():
                stop()
        try:
            return running.result()
        except (PySparkException, Py4JError) as error:
            # How a result is collected decides which of the two it is.
            why = str(error).partition("\n\tat ")[0]
            raise RedriveError(
                f"Spark gave up the redrive {share.request.run}: {why}; whatever was done is done, and running it again"
                " under the same key goes on with it"
            ) from error
