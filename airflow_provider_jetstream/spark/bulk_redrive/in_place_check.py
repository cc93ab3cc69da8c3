"""Telling whether a frame asks for no more and no less than a redrive in place does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as f

from airflow_provider_jetstream.jetstream.archive import ArchiveReader
from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.spark.bulk_redrive.driver_scan import audit_log
from airflow_provider_jetstream.spark.dead_letters.schema import CHANGEABLE, REPAIRED, SEQUENCE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame

    from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
    from airflow_provider_jetstream.spark.bulk_redrive.driver_scan import DriverScan

# Jobs that are no dead letters any more are missing from a frame rightly; with more of them copies do.
_MOST_MISSING = 10_000


def repaired(letters: DataFrame, columns: Sequence[str]) -> bool:
    """Tell whether a frame may ask for changes.

    :param letters: the frame
    :param columns: which of its columns are used
    :return: whether it may
    """
    if REPAIRED not in columns:
        return bool(set(columns) & set(CHANGEABLE))
    return not letters.where(f.expr(f"coalesce({REPAIRED}, true)")).isEmpty()


def missing(letters: DataFrame, found: DriverScan) -> list[int]:
    """Find the jobs that the dead letter queue speaks of and a frame doesn't.

    :param letters: the frame
    :param found: the look at the queue
    :return: stream sequences; not many more than are looked at
    """
    known = letters.sparkSession.createDataFrame(found.jobs.select(["sequence"]))
    rows = known.join(letters.select(SEQUENCE), SEQUENCE, "left_anti").limit(_MOST_MISSING + 1).collect()
    return [row[0] for row in rows]


async def any_dead(connection: BlockingConnection, found: DriverScan, sequences: Sequence[int]) -> bool:
    """Tell whether any of these jobs is a dead letter in circulation.

    :param connection: the server
    :param found: the look at the queue
    :param sequences: stream sequences
    :return: whether one is; also where there are too many to look at
    """
    if len(sequences) > _MOST_MISSING:
        return True
    scan = found.scan
    archive = await ArchiveReader.open(connection, scan.queue, scan.snapshot.created_at)
    audit = audit_log(connection, found) if scan.audit else None
    doubted = scan.reconciliation.inconsistent_consumers
    judge = await scan.context.classifier(
        connection, scan.index, archive=archive, audit=audit, inconsistent_consumers=doubted
    )
    judged = await judge.classify_all([(sequence, scan.index.entries_of(sequence)) for sequence in sequences])
    return any(isinstance(each, DeadLetter) and Selection().matches(each) for each in judged)
