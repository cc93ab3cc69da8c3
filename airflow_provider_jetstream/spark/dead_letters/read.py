"""Reads dead letters: the driver scans the queue as a whole, tasks classify the letters and fetch their bodies.

A snapshot keeps letters as they were at one time as Parquet: evidence, and the same input for every later step.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as f

from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource, DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.reconciliation import Reconciliation
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import TransientError
from airflow_provider_jetstream.spark.connections import blocking_connection, run_on_own_connection
from airflow_provider_jetstream.spark.dead_letters.scanned_jobs import (
    ScannedJobs,
    load_queue,
    partition_jobs,
    task_count,
    unpack_jobs,
)
from airflow_provider_jetstream.spark.dead_letters.schema import (
    DIED_AT,
    LETTER_DDL,
    SEQUENCE,
    letter_batch,
)

if TYPE_CHECKING:
    from array import array
    from collections.abc import AsyncGenerator, Iterator, Mapping
    from pathlib import Path

    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray
    from pyspark.sql import DataFrame, SparkSession

    from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
    from airflow_provider_jetstream.jetstream.dead_letters.death import Death
    from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex
    from airflow_provider_jetstream.jetstream.dead_letters.facts import ScanContext
    from airflow_provider_jetstream.jetstream.dead_letters.status import Page
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

    Integers = NDArray[np.int64]
    Mask = NDArray[np.bool_]


_BYTES_PER_BATCH = 16 << 20
# Batches of 250 rows would cost a third more of the JVM's time.
_ROWS_PER_BATCH = 2000
# The task gives up, and Spark decides, after this many failures without a page between them.
_ATTEMPTS = 5
_PAUSE = 0.5


@dataclass(frozen=True)
class ClassifyTask:
    """What every task of a scan does; pickled and sent to executors.

    :param options: connection options of the data source
    :param inconsistent_consumers: consumers that hold more jobs than the advisories account for
    :param lost: whether to include jobs whose bodies weren't preserved
    """

    options: Mapping[str, str]
    context: ScanContext
    inconsistent_consumers: frozenset[str]
    selection: Selection
    lost: bool

    def classify(self, index: EntryIndex, orphans: array[int]) -> Iterator[pa.RecordBatch]:
        """Classify jobs.

        :param index: the jobs' entries
        :param orphans: jobs without entries
        :return: the dead letters, in order
        :raises TransientError: the server was away for too long
        """
        reconciliation = Reconciliation(orphans, inconsistent_consumers=set(self.inconsistent_consumers))
        letters: list[DeadLetter] = []
        lost: list[Death] = []
        after = failures = 0
        while True:
            try:
                for page, lost_deaths in self._pages(index, reconciliation, after):
                    failures = 0
                    letters += page.letters
                    lost += lost_deaths
                    sequences = [letter.sequence for letter in page.letters]
                    sequences += [death.sequence for death in lost_deaths]
                    after = max(sequences, default=after)
                    size = sum(len(letter.body) for letter in letters)
                    if len(letters) + len(lost) >= _ROWS_PER_BATCH or size >= _BYTES_PER_BATCH:
                        yield letter_batch(letters, lost)
                        letters, lost = [], []
            except TransientError:
                failures += 1
                if failures >= _ATTEMPTS:
                    raise
                time.sleep(_PAUSE * failures)
            else:
                break
        if letters or lost:
            yield letter_batch(letters, lost)

    def _pages(
        self, index: EntryIndex, reconciliation: Reconciliation, after: int
    ) -> Iterator[tuple[Page, list[Death]]]:
        with blocking_connection(self.options) as connection:
            queue = self.context.queue
            connection.run(connection.discover_capabilities(stream.name for stream in (queue, *queue.companions())))
            scan = connection.run(Scan.for_partition(connection, self.context, index, reconciliation))
            pages = scan.pages(self.selection, after)
            while page := connection.run(_next_page(pages)):
                yield page, self._lost_deaths(scan, page)

    def _lost_deaths(self, scan: Scan, page: Page) -> list[Death]:
        deaths: list[Death] = []
        for job in page.dismissed if self.lost else ():
            if death := job.death:
                letter = DeadLetter(
                    death, "", b"", (), "", BodySource.COPY, job.entries, preserved=False, ready_at=death.died_at
                )
                if self.selection.matches(letter, scan.now):
                    deaths.append(death)
        return deaths


async def _next_page(pages: AsyncGenerator[Page, None]) -> Page | None:
    # Not anext(pages, None): CPython 3.12 unpacks a tuple that is sent into it, and answers of the server are tuples.
    try:
        return await anext(pages)
    except StopAsyncIteration:
        return None


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
        for index, orphans in unpack_jobs(batches):
            yield from task.classify(index, orphans)

    partitions = partition_jobs(session, jobs, tasks or task_count(session, len(jobs)))
    return partitions.mapInArrow(classify, LETTER_DDL)


async def _scan(connection: BlockingConnection, queue: Any, selection: Selection) -> tuple[ScannedJobs, Scan]:
    declared = await load_queue(connection, queue)
    await connection.discover_capabilities(stream.name for stream in (declared, *declared.companions()))
    scan = await Scan.begin(connection, declared, unaccounted=selection.unaccounted)
    return await ScannedJobs.of_scan(scan, selection), scan


def _log_scan(jobs: ScannedJobs, scan: Scan) -> None:
    log.info("Entries about %d jobs in %s to classify", len(jobs), scan.dead_letter_queue)
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
