"""Reads dead letters: the driver scans the queue as a whole, tasks classify the letters and fetch their bodies.

A snapshot keeps letters as they were at one time as Parquet: evidence, and the same input for every later step.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as f

from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.spark.connections import run_on_own_connection
from airflow_provider_jetstream.spark.dead_letters.classify import ClassifyTask
from airflow_provider_jetstream.spark.dead_letters.entry_table import (
    load_queue,
    partition_jobs,
    scanned_jobs,
    task_count,
    unpack_jobs,
)
from airflow_provider_jetstream.spark.dead_letters.letter_rows import LETTER_DDL
from airflow_provider_jetstream.spark.dead_letters.schema import DIED_AT, SEQUENCE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

log = logging.getLogger(__name__)

DAY: Final = "day"

_SECONDS_PER_DAY = 86_400


def read_letters(
    session: SparkSession,
    queue: WorkQueue | Mapping[str, Any] | Path | str,
    connection: Mapping[str, str] | str | None = None,
    select: Selection | Mapping[str, Any] | None = None,
    *,
    lost: bool = False,
    tasks: int | None = None,
) -> DataFrame:
    """Find a queue's dead letters, with or without an entry, each with all that is known about it.

    The driver scans the queue now; the letters are classified, and their bodies fetched, whenever the frame is
    evaluated. Take a :func:`snapshot` and work from that.

    :param queue: the work queue; a name is looked up on the server, a path ends in ``.yaml`` or ``.yml``
    :param connection: connection options of the data source, or the value of its option ``connection``; the environment
        where absent
    :param select: which letters; all in circulation where absent
    :param lost: whether to include what is known about letters whose bodies weren't preserved
    :param tasks: the number of tasks; one per 20,000 letters where absent
    :return: the letters in no order, with the columns of :mod:`~.schema`
    :raises SelectionError: the selection is invalid
    :raises QueueDeclarationError: the queue declares no dead letter queue
    :raises NotFoundError: the work queue or its dead letter queue doesn't exist
    :raises TransientError: the server is away
    """
    options = {"connection": connection} if isinstance(connection, str) else dict(connection or {})
    selection = Selection.of(select)
    jobs, scan = run_on_own_connection(options, lambda connection: _scan(connection, queue, selection))
    _log_scan(jobs, scan)
    task = ClassifyTask(options, scan.context, frozenset(scan.reconciliation.inconsistent_consumers), selection, lost)

    def classify(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return task.classify(unpack_jobs(batches))

    partitions = partition_jobs(session, jobs, tasks or task_count(session, jobs.num_rows))
    return partitions.mapInArrow(classify, LETTER_DDL)


async def _scan(connection: BlockingConnection, queue: Any, selection: Selection) -> tuple[pa.Table, Scan]:
    declared = await load_queue(connection, queue)
    await connection.discover_capabilities(stream.name for stream in (declared, *declared.companions()))
    scan = await Scan.begin(connection, declared, unaccounted=selection.unaccounted)
    return await scanned_jobs(scan, selection), scan


def _log_scan(jobs: pa.Table, scan: Scan) -> None:
    log.info("Entries about %d jobs in %s to classify", jobs.num_rows, scan.dead_letter_queue)
    if scan.uncertain:
        log.warning("%d more jobs may be dead: they can't be identified yet", scan.uncertain)
    if scan.undeliverable:
        log.warning("%d jobs of %s match no consumer", scan.undeliverable, scan.queue.name)
    for risk in scan.risks:
        log.warning("%s", risk)


def snapshot(letters: DataFrame, path: str) -> DataFrame:
    """Write letters as Parquet, partitioned by the UTC day of their death, and read back what was written.

    :param letters: from :func:`read_letters`
    :param path: a directory that doesn't exist yet, on storage that driver and executors share
    :return: the letters as they were written, with a column ``day``
    """
    # Whatever the session's time zone is.
    day = f.date_from_unix_date(f.floor(f.unix_seconds(DIED_AT) / _SECONDS_PER_DAY).cast("int"))
    dated = letters.withColumn(DAY, day)
    dated.sortWithinPartitions(DAY, SEQUENCE).write.partitionBy(DAY).mode("error").parquet(path)
    return read_snapshot(letters.sparkSession, path)


def read_snapshot(session: SparkSession, path: str) -> DataFrame:
    """Read letters that :func:`snapshot` wrote.

    :param path: where it wrote them
    """
    # A snapshot without letters has no files from which Spark could infer the columns.
    return session.read.schema(f"{LETTER_DDL}, {DAY} date").parquet(path)
