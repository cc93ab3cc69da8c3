"""The driver's look at a queue before its letters are divided among tasks, and what it writes down about the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.errors import ApiError, RedriveError, TransientError
from airflow_provider_jetstream.jetstream.redrive.protocol import ProtocolChoice, choose_protocol
from airflow_provider_jetstream.spark.dead_letters.entry_table import load_queue, scanned_jobs

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

    from airflow_provider_jetstream.jetstream.audit.log import AuditLog, RunRecord
    from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest


@dataclass(frozen=True, slots=True)
class DriverScan:
    """How a queue was when the driver looked.

    :param scan: the look at it as a whole; its connection is closed
    :param choice: how letters are brought back
    :param acknowledged: jobs of which an ack metric tells, where that matters
    :param server: who was asked, as that tells of itself
    :param jobs: what the dead letter queue says about which jobs
    """

    scan: Scan
    choice: ProtocolChoice
    acknowledged: frozenset[int]
    server: Mapping[str, Any]
    jobs: pa.Table


async def scan_queue(connection: BlockingConnection, queue: Any, order: RedriveRequest) -> DriverScan:
    """Look at a queue as a whole.

    :param connection: the server
    :param queue: the work queue; a name is looked up on the server
    :param order: what is asked for
    :return: how things are
    :raises RedriveOrderError: what is asked for isn't possible here
    :raises QueueDeclarationError: the queue declares no dead letter queue
    :raises NotFoundError: the work queue or its dead letter queue doesn't exist
    """
    declared = await load_queue(connection, queue)
    streams = [declared, declared.archive, declared.audit, declared.events, declared.dead_letters]
    await connection.discover_capabilities(stream.name for stream in streams if stream)
    scan = await Scan.begin(connection, declared, vanished=order.selection.vanished)
    choice = choose_protocol(order, scan.snapshot, connection.api_level)
    judge = await scan.context.classifier(
        connection,
        scan.index,
        archive=scan.archive,
        audit=scan.audit,
        inconsistent_consumers=scan.reconciliation.inconsistent_consumers,
    )
    acknowledged = frozenset(await judge.metrics.acknowledged())
    return DriverScan(
        scan, choice, acknowledged, dict(connection.socket.server_info), await scanned_jobs(scan, order.selection)
    )


async def begin_run(
    connection: BlockingConnection, found: DriverScan, order: RedriveRequest, report: RedriveReport
) -> RunRecord:
    """Write down that a run begins or goes on, and take note of what an earlier try did.

    :param connection: the server
    :param found: the look at the queue, which has an audit
    :param order: what is asked for, with the run's key
    :param report: takes note
    :return: its record
    :raises RedriveError: it can't be recorded
    """
    audit = audit_log(connection, found)
    try:
        record = await audit.begin_run(order.run or "", order.who, order.why)
        if record.report:
            # An earlier try may have been told to stop.
            record = record.model_copy(update={"report": {}})
            await audit.record_progress(record)
    except (ApiError, TransientError) as error:
        raise RedriveError(
            f"expected {audit.stream} to record the redrive, found: {error}; nothing was redriven: see to it that"
            " the audit takes records, then run it again"
        ) from None
    async for done in audit.letters_of_run(record):
        if done.action == "parked":
            report.add_parked(done.sequence)
        else:
            report.redriven.add(done.sequence, done.new_sequence or done.sequence)
        report.resumed += 1
    return record


def audit_log(connection: BlockingConnection, found: DriverScan) -> AuditLog:
    """Give the audit of a queue that has one, over another connection.

    :param connection: the server
    :param found: the look at the queue
    :return: the audit
    """
    audit = found.scan.audit
    if audit is None:
        raise ValueError("expected a queue with an audit")
    return type(audit)(connection, audit.stream, audit.queue, audit.created)
