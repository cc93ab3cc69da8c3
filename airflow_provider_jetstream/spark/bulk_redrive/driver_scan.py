"""The driver's scan of a queue before its letters are divided among tasks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pyspark.sql import functions as f

from airflow_provider_jetstream.jetstream.archive import ArchiveReader
from airflow_provider_jetstream.jetstream.audit.intent import no_audit
from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import RedriveRequestError
from airflow_provider_jetstream.jetstream.redrive.copy_room import require_room_for_all
from airflow_provider_jetstream.jetstream.redrive.protocol import ProtocolChoice, choose_protocol
from airflow_provider_jetstream.jetstream.redrive.request import Protocol
from airflow_provider_jetstream.spark.bulk_redrive.spark_job import MOST_TASKS
from airflow_provider_jetstream.spark.connections import run_on_own_connection
from airflow_provider_jetstream.spark.dead_letters.entry_table import load_queue, scanned_jobs
from airflow_provider_jetstream.spark.dead_letters.schema import CHANGEABLE, REPAIRED, SEQUENCE, STREAM_CREATED
from airflow_provider_jetstream.spark.errors import SparkOptionError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    import pyarrow as pa
    from pyspark.sql import DataFrame

    from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest

# Jobs that are no longer dead letters may be missing from a frame; with more of them the letters are copied.
_MOST_MISSING = 10_000


@dataclass(frozen=True, slots=True)
class DriverScan:
    """The driver's scan of a queue.

    :param scan: the scan of the whole queue; its connection is closed
    :param acknowledged: when the ack metrics of jobs were stored, where that matters
    :param server_info: the INFO of the server that the driver was connected to
    :param jobs: the jobs' entries, a row per job
    """

    scan: Scan
    choice: ProtocolChoice
    acknowledged: Mapping[int, datetime]
    server_info: Mapping[str, Any]
    jobs: pa.Table


def checked_request(request: RedriveRequest, tasks: int | None) -> RedriveRequest:
    """Return a request for a frame's letters, with a run key.

    :raises SparkOptionError: it has what only a redrive without Spark takes
    """
    if request.transform is not None or request.patch is not None:
        name = "transform" if request.patch is None else "patch"
        raise SparkOptionError(f"expected repairs in the frame, found a {name} in the request: leave it out")
    if request.selection.sequences is not None:
        raise SparkOptionError("expected letters by the frame's rows, found sequences in the request: leave them out")
    if request.target is not None or request.order_key is not None:
        name = "order_key" if request.target is None else "target"
        raise SparkOptionError(
            f"expected a redrive to the letters' own queue in any order, found {name}: Spark's tasks redrive beside"
            " each other and check one queue only; redrive without Spark"
        )
    if request.discard or request.undo:
        raise SparkOptionError(
            "expected letters to be redriven or parked, found discard or undo: do that without Spark"
        )
    if tasks is not None and not 1 <= tasks <= MOST_TASKS:
        raise SparkOptionError(f"expected from 1 to {MOST_TASKS} tasks, found tasks {tasks}")
    return request if request.run else replace(request, run=uuid4().hex)


async def scan_queue(connection: BlockingConnection, queue: Any, request: RedriveRequest) -> DriverScan:
    """Scan a whole queue; a name is looked up on the server.

    :raises RedriveRequestError: the queue doesn't allow what is requested
    :raises QueueDeclarationError: the queue declares no dead letter queue
    :raises NotFoundError: the work queue or its dead letter queue doesn't exist
    """
    if request.census:
        raise RedriveRequestError("expected no census of a bulk redrive, found one: redrive without Spark")
    declared = await load_queue(connection, queue)
    streams = [declared, declared.archive, declared.audit, declared.events, declared.dead_letters]
    await connection.discover_capabilities(stream.name for stream in streams if stream)
    scan = await Scan.begin(connection, declared, unaccounted=request.selection.unaccounted)
    if scan.audit is None:
        raise no_audit(declared.name)
    choice = choose_protocol(request, scan.snapshot, connection.api_level, scan.context.handler_names)
    jobs = await scanned_jobs(scan, request.selection)
    if choice.protocol != Protocol.IN_PLACE:
        parked_in = None if request.max_redrives is None else scan.dead_letter_queue
        require_room_for_all(scan.snapshot, jobs.num_rows, connection.max_payload, parked_in)
    reader = await scan.context.reader(
        connection,
        scan.index,
        archive=scan.archive,
        audit=scan.audit,
        inconsistent_consumers=scan.reconciliation.inconsistent_consumers,
        orphans=scan.reconciliation.orphans,
    )
    acknowledged = dict(await reader.acknowledgements.times())
    server_info = dict(connection.socket.server_info)
    return DriverScan(scan, choice, acknowledged, server_info, jobs)


def require_no_handler(scan: DriverScan) -> None:
    """Refuse to redrive where a handler of the dead letter queue could get the same letters at the same time.

    Spark's tasks don't claim entries.

    :raises RedriveRequestError: the dead letter queue has a handler; nothing was done
    """
    context = scan.scan.context
    if context.handlers:
        raise RedriveRequestError(
            f"expected a dead letter queue without handlers, found {context.dead_letter_queue['config']['name']} with"
            f" its consumer {', '.join(context.handler_names)}: a bulk redrive doesn't claim letters, so both could do"
            " the same ones; redrive without Spark, which claims each letter first"
        )


def frame_problem(options: Mapping[str, str], letters: DataFrame, scan: DriverScan) -> str:
    """Return why a redrive in place isn't what a frame requests; empty where it is.

    :param options: connection options of the data source
    """
    if _has_repairs(letters):
        return "the frame has repaired rows, or doesn't say that they aren't"
    if _has_rows_of_another_stream(letters, scan):
        return "the frame has letters of another stream, or of one that was created anew since"
    missing = _missing_jobs(letters, scan)
    incomplete: bool = run_on_own_connection(options, lambda connection: _any_dead(connection, scan, missing))
    return "the frame leaves dead letters out" if incomplete else ""


def _has_repairs(letters: DataFrame) -> bool:
    if REPAIRED not in letters.columns:
        return bool(set(letters.columns) & set(CHANGEABLE))
    return not letters.where(f.expr(f"coalesce({REPAIRED}, true)")).isEmpty()


def _has_rows_of_another_stream(letters: DataFrame, scan: DriverScan) -> bool:
    if STREAM_CREATED not in letters.columns:
        return False
    return not letters.where(f.col(STREAM_CREATED) != scan.scan.snapshot.created).isEmpty()


def _missing_jobs(letters: DataFrame, scan: DriverScan) -> list[int]:
    """Find the jobs with entries that a frame leaves out; one more than the limit at most."""
    known = letters.sparkSession.createDataFrame(scan.jobs.select(["sequence"]))
    rows = known.join(letters.select(SEQUENCE), SEQUENCE, "left_anti").limit(_MOST_MISSING + 1).collect()
    return [row[0] for row in rows]


async def _any_dead(connection: BlockingConnection, driver_scan: DriverScan, sequences: Sequence[int]) -> bool:
    """Return whether any of the jobs is a dead letter in circulation, or there are too many to find out."""
    if len(sequences) > _MOST_MISSING:
        return True
    return bool(await still_dead(connection, driver_scan, sequences, Selection()))


async def still_dead(
    connection: BlockingConnection, driver_scan: DriverScan, sequences: Sequence[int], selection: Selection
) -> list[int]:
    """Return which of the jobs are dead letters of a selection."""
    scan = driver_scan.scan
    archive = await ArchiveReader.open(connection, scan.queue, scan.snapshot.info)
    audit = AuditLog.from_snapshot(connection, scan.queue, scan.snapshot)
    reader = await scan.context.reader(
        connection,
        scan.index,
        archive=archive,
        audit=audit,
        inconsistent_consumers=scan.reconciliation.inconsistent_consumers,
    )
    results = await reader.classify([(sequence, scan.index.entries_of(sequence)) for sequence in sequences])
    return [
        result.sequence for result in results if isinstance(result, DeadLetter) and selection.matches(result, scan.now)
    ]
