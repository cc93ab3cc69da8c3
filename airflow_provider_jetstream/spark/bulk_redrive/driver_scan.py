"""The driver's scan of a queue before its letters are divided among tasks, and the record of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as f

from airflow_provider_jetstream.jetstream.archive import ArchiveReader
from airflow_provider_jetstream.jetstream.audit.fence import SharedLease
from airflow_provider_jetstream.jetstream.audit.intent import no_audit
from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    LeaseLostError,
    RedriveError,
    RedriveRequestError,
    TransientError,
)
from airflow_provider_jetstream.jetstream.redrive.copy_room import require_room_for_all
from airflow_provider_jetstream.jetstream.redrive.protocol import ProtocolChoice, choose_protocol
from airflow_provider_jetstream.jetstream.redrive.request import Protocol
from airflow_provider_jetstream.spark.connections import run_on_own_connection
from airflow_provider_jetstream.spark.dead_letters.entry_table import load_queue, scanned_jobs
from airflow_provider_jetstream.spark.dead_letters.schema import CHANGEABLE, REPAIRED, SEQUENCE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    import pyarrow as pa
    from pyspark.sql import DataFrame

    from airflow_provider_jetstream.jetstream.audit.log import RunRecord
    from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
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
    scan = await Scan.begin(connection, declared, vanished=request.selection.vanished)
    await scan.account(as_recorded=True)
    if scan.audit is None:
        raise no_audit(declared.name)
    choice = choose_protocol(request, scan.snapshot, connection.api_level, scan.context.handler_names)
    jobs = await scanned_jobs(scan, request.selection)
    if choice.protocol != Protocol.IN_PLACE:
        parked_in = None if request.max_redrives is None else scan.dead_letter_queue
        require_room_for_all(scan.snapshot, jobs.num_rows, connection.max_payload, parked_in)
    classifier = await scan.context.classifier(
        connection,
        scan.index,
        archive=scan.archive,
        audit=scan.audit,
        inconsistent_consumers=scan.reconciliation.inconsistent_consumers,
        orphans=scan.reconciliation.orphans,
    )
    acknowledged = await classifier.metrics.acknowledged()
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
    missing = _missing_jobs(letters, scan)
    incomplete: bool = run_on_own_connection(options, lambda connection: _any_dead(connection, scan, missing))
    return "the frame leaves dead letters out" if incomplete else ""


def _has_repairs(letters: DataFrame) -> bool:
    if REPAIRED not in letters.columns:
        return bool(set(letters.columns) & set(CHANGEABLE))
    return not letters.where(f.expr(f"coalesce({REPAIRED}, true)")).isEmpty()


def _missing_jobs(letters: DataFrame, scan: DriverScan) -> list[int]:
    """Find the jobs with entries that a frame leaves out; one more than the limit at most."""
    known = letters.sparkSession.createDataFrame(scan.jobs.select(["sequence"]))
    rows = known.join(letters.select(SEQUENCE), SEQUENCE, "left_anti").limit(_MOST_MISSING + 1).collect()
    return [row[0] for row in rows]


async def _any_dead(connection: BlockingConnection, driver_scan: DriverScan, sequences: Sequence[int]) -> bool:
    """Return whether any of the jobs is a dead letter in circulation, or there are too many to find out."""
    if len(sequences) > _MOST_MISSING:
        return True
    scan = driver_scan.scan
    archive = await ArchiveReader.open(connection, scan.queue, scan.snapshot.created_at)
    audit = AuditLog.from_snapshot(connection, scan.queue, scan.snapshot)
    classifier = await scan.context.classifier(
        connection,
        scan.index,
        archive=archive,
        audit=audit,
        inconsistent_consumers=scan.reconciliation.inconsistent_consumers,
    )
    results = await classifier.classify_all([(sequence, scan.index.entries_of(sequence)) for sequence in sequences])
    return any(isinstance(result, DeadLetter) and Selection().matches(result) for result in results)


async def begin_run(
    connection: BlockingConnection,
    scan: DriverScan,
    request: RedriveRequest,
    report: RedriveReport,
    lease_token: int | None = None,
) -> RunRecord:
    """Record in the audit that a run begins or resumes, and add to the report what an earlier attempt did.

    :param request: with the run's key
    :param lease_token: the token of the queue's lease
    :raises LeaseLostError: somebody else has the lease
    :raises RedriveError: it can't be recorded
    """
    audit = audit_log(connection, scan, lease_token)
    try:
        record = await audit.begin_run(request.run or "", request.who, request.why)
        if record.report:
            # An earlier attempt may have been cancelled.
            record = record.model_copy(update={"report": {}})
            await audit.record_progress(record)
    except LeaseLostError:
        raise
    except (ApiError, TransientError) as error:
        raise RedriveError(
            f"expected {audit.stream} to record the redrive, found: {error}; nothing was redriven: make sure that the"
            " audit stores records, then run it again"
        ) from None
    async for letter in audit.letters_of_run(record):
        if letter.action == "parked":
            report.add_parked(letter.sequence)
        else:
            report.add_redriven(letter.sequence, letter.new_sequence or letter.sequence, letter.new_stream)
        report.resumed += 1
    return record


def audit_log(connection: BlockingConnection, scan: DriverScan, lease_token: int | None = None) -> AuditLog:
    """Return the queue's audit over another connection; the queue has one.

    :param lease_token: the token of the queue's lease, without which nothing is stored
    """
    audit = AuditLog.from_snapshot(connection, scan.scan.queue, scan.scan.snapshot)
    if audit is None:
        raise ValueError("expected a queue with an audit")
    if lease_token is None:
        return audit
    return audit.fenced(SharedLease(connection, audit.stream, audit.queue, lease_token))
