"""Reading dead letters: the driver looks at the queue as a whole, tasks prove the letters and fetch their bodies."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.spark.connections import run_on_own_connection
from airflow_provider_jetstream.spark.dead_letters.classify import ClassifyTask
from airflow_provider_jetstream.spark.dead_letters.entry_table import load_queue, scanned_jobs
from airflow_provider_jetstream.spark.dead_letters.letter_rows import LETTER_DDL
from airflow_provider_jetstream.spark.dead_letters.task_partitions import partition_jobs, task_count, unpack_jobs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

log = logging.getLogger(__name__)


def read_letters(
    session: SparkSession,
    queue: WorkQueue | Mapping[str, Any] | Path | str,
    connection: Mapping[str, str] | str | None = None,
    select: Selection | Mapping[str, Any] | None = None,
    *,
    lost: bool = False,
    tasks: int | None = None,
) -> DataFrame:
    """Find a queue's dead letters, told of or not, each with all that is known about it.

    The driver looks at the queue now; the letters are proved, and their bodies fetched, whenever the frame is
    evaluated. Take a :func:`~.snapshots.snapshot` and work from that.

    :param session: Spark
    :param queue: the work queue; a name is looked up on the server, a path ends in ``.yaml`` or ``.yml``
    :param connection: options of the data source that say where and as whom, or the name that its option
        ``connection`` takes; the environment where absent
    :param select: which letters; all in circulation where absent
    :param lost: whether to give also what is known about letters whose bodies nobody kept
    :param tasks: among how many tasks to divide them; up to 20,000 each where absent
    :return: the letters in no order, with the columns of :mod:`~.columns`
    :raises SelectionError: the selection can't be used
    :raises QueueDeclarationError: the queue declares no dead letter queue
    :raises NotFoundError: the work queue or its dead letter queue doesn't exist
    :raises TransientError: the server is away
    """
    given = {"connection": connection} if isinstance(connection, str) else dict(connection or {})
    selection = Selection.of(select)
    jobs, scan = run_on_own_connection(given, lambda connection: _look(connection, queue, selection))
    _tell(jobs, scan)
    proving = ClassifyTask(given, scan.context, frozenset(scan.reconciliation.inconsistent_consumers), selection, lost)

    def prove(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return proving.classify(unpack_jobs(batches))

    told = partition_jobs(session, jobs, tasks or task_count(session, jobs.num_rows))
    return told.mapInArrow(prove, LETTER_DDL)


async def _look(connection: BlockingConnection, queue: Any, selection: Selection) -> tuple[pa.Table, Scan]:
    declared = await load_queue(connection, queue)
    await connection.discover_capabilities(stream.name for stream in (declared, *declared.companions()))
    scan = await Scan.begin(connection, declared, vanished=selection.vanished)
    return await scanned_jobs(scan, selection), scan


def _tell(jobs: pa.Table, scan: Scan) -> None:
    log.info("Entries about %d jobs in %s to prove", jobs.num_rows, scan.dead_letter_queue)
    if scan.reconciliation.uncertain:
        log.warning("%d more dead letters can't be told apart yet: jobs are in flight", scan.reconciliation.uncertain)
    if scan.undeliverable:
        log.warning("%d jobs of %s match no consumer", scan.undeliverable, scan.queue.name)
    for risk in scan.risks:
        log.warning("%s", risk)
