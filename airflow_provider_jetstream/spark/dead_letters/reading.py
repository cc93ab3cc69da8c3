"""Reading dead letters: the driver looks at the queue as a whole, tasks prove the letters and fetch their bodies."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from heapq import merge
from math import ceil
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.discovery import discover_queue
from airflow_provider_jetstream.jetstream.queue import WorkQueue
from airflow_provider_jetstream.spark.dead_letters.columns import SEQUENCE
from airflow_provider_jetstream.spark.dead_letters.proving import JOB_SCHEMA, Proving, jobs_batch
from airflow_provider_jetstream.spark.dead_letters.records import LETTER_DDL
from airflow_provider_jetstream.spark.driven import driven

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from airflow_provider_jetstream.jetstream.dead_letters.mentions import Mention

log = logging.getLogger(__name__)

_ROWS_OF_A_BATCH = 10_000
# Some seconds of work: what is lost where a task is tried again.
_ROWS_OF_A_TASK = 20_000
# Sequences beyond are no server's, but an entry may say anything.
_LAST_SEQUENCE = 2**63 - 1


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
    :param tasks: among how many tasks to divide them; some thousand each where absent
    :return: the letters, with the columns of :mod:`~.columns`
    :raises SelectionError: the selection can't be used
    :raises QueueDeclarationError: the queue declares no dead letter queue
    :raises NotFoundError: the work queue or its dead letter queue doesn't exist
    :raises TransientError: the server is away
    """
    given = {"connection": connection} if isinstance(connection, str) else dict(connection or {})
    selection = Selection.of(select)
    # In a thread, since a notebook has an event loop of its own, which would be taken for the scan's.
    with ThreadPoolExecutor(1) as thread:
        jobs, scan = thread.submit(_look, given, queue, selection).result()
    proving = Proving(given, scan.premises, frozenset(scan.reckoning.doubted), selection, lost)

    def prove(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return proving.prove(batches)

    share = tasks or max(2, ceil(jobs.num_rows / _ROWS_OF_A_TASK))
    told = session.createDataFrame(jobs).repartitionByRange(share, SEQUENCE)
    return told.mapInArrow(prove, LETTER_DDL)


def _look(given: Mapping[str, str], queue: Any, selection: Selection) -> tuple[pa.Table, Scan]:
    with driven(given) as connection:

        async def look() -> tuple[pa.Table, Scan]:
            if isinstance(queue, str) and not queue.endswith((".yaml", ".yml")):
                declared = await discover_queue(connection, queue)
            else:
                declared = WorkQueue.load(queue)
            await connection.learn(stream.name for stream in (declared, *declared.companions()))
            scan = await Scan.begin(connection, declared, vanished=selection.vanished)
            return await _jobs(scan, selection), scan

        jobs, scan = connection.run(look())
    log.info("Entries about %d jobs in %s to prove", jobs.num_rows, scan.letters_name)
    if scan.reckoning.uncertain:
        log.warning("%d more dead letters can't be told apart yet: jobs are in flight", scan.reckoning.uncertain)
    if scan.undeliverable:
        log.warning("%d jobs of %s match no consumer", scan.undeliverable, scan.queue.name)
    for risk in scan.risks:
        log.warning("%s", risk)
    return jobs, scan


async def _jobs(scan: Scan, selection: Selection) -> pa.Table:
    untold: list[tuple[int, tuple[Mention, ...]]] = [(sequence, ()) for sequence in await scan.untold(selection)]
    batches: list[pa.RecordBatch] = []
    rows: list[tuple[int, tuple[Mention, ...]]] = []
    for job in merge(scan.index.jobs(), untold, key=lambda job: job[0]):
        if job[0] > _LAST_SEQUENCE or (selection.sequences is not None and job[0] not in selection.sequences):
            continue
        rows.append(job)
        if len(rows) == _ROWS_OF_A_BATCH:
            batches.append(jobs_batch(rows))
            rows = []
    return pa.Table.from_batches([*batches, jobs_batch(rows)], JOB_SCHEMA)
