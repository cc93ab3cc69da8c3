"""The driver's look at a queue before its letters are divided among tasks, and what it writes down about the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.errors import ApiError, RedriveError, TransientError
from airflow_provider_jetstream.jetstream.redrive.choice import Choice, choose
from airflow_provider_jetstream.spark.dead_letters.told import declared_queue, told_jobs

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

    from airflow_provider_jetstream.jetstream.audit import Audit, RunRecord
    from airflow_provider_jetstream.jetstream.redrive.order import RedriveOrder
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
    from airflow_provider_jetstream.spark.driven import DrivenConnection


@dataclass(frozen=True, slots=True)
class Look:
    """How a queue was when the driver looked.

    :param scan: the look at it as a whole; its connection is closed
    :param choice: how letters are brought back
    :param acknowledged: jobs of which an ack metric tells, where that matters
    :param server: who was asked, as that tells of itself
    :param jobs: what the dead letter queue says about which jobs
    """

    scan: Scan
    choice: Choice
    acknowledged: frozenset[int]
    server: Mapping[str, Any]
    jobs: pa.Table


async def look(connection: DrivenConnection, queue: Any, order: RedriveOrder) -> Look:
    """Look at a queue as a whole.

    :param connection: the server
    :param queue: the work queue; a name is looked up on the server
    :param order: what is asked for
    :return: how things are
    :raises RedriveOrderError: what is asked for isn't possible here
    :raises QueueDeclarationError: the queue declares no dead letter queue
    :raises NotFoundError: the work queue or its dead letter queue doesn't exist
    """
    declared = await declared_queue(connection, queue)
    streams = [declared, declared.archive, declared.audit, declared.events, declared.dead_letters]
    await connection.learn(stream.name for stream in streams if stream)
    scan = await Scan.begin(connection, declared, vanished=order.selection.vanished)
    choice = choose(order, scan.around, connection.api_level)
    judge = await scan.premises.judge(
        connection, scan.index, archive=scan.archive, audit=scan.audit, doubted=scan.reckoning.doubted
    )
    acknowledged = frozenset(await judge.metrics.acknowledged())
    return Look(scan, choice, acknowledged, dict(connection.wire.banner), await told_jobs(scan, order.selection))


async def begin_run(connection: DrivenConnection, found: Look, order: RedriveOrder, report: RedriveReport) -> RunRecord:
    """Write down that a run begins or goes on, and take note of what an earlier try did.

    :param connection: the server
    :param found: the look at the queue, which has an audit
    :param order: what is asked for, with the run's key
    :param report: takes note
    :return: its record
    :raises RedriveError: it can't be recorded
    """
    audit = audit_over(connection, found)
    try:
        record = await audit.begin(order.run or "", order.who, order.why)
        if record.report:
            # An earlier try may have been told to stop.
            record = record.model_copy(update={"report": {}})
            await audit.progress(record)
    except (ApiError, TransientError) as error:
        raise RedriveError(
            f"expected {audit.stream} to record the redrive, found: {error}; nothing was redriven: see to it that"
            " the audit takes records, then run it again"
        ) from None
    async for done in audit.done_by(record):
        if done.action == "parked":
            report.park(done.sequence)
        else:
            report.redriven.add(done.sequence, done.new_sequence or done.sequence)
        report.resumed += 1
    return record


def audit_over(connection: DrivenConnection, found: Look) -> Audit:
    """Give the audit of a queue that has one, over another connection.

    :param connection: the server
    :param found: the look at the queue
    :return: the audit
    """
    audit = found.scan.audit
    if audit is None:
        raise ValueError("expected a queue with an audit")
    return type(audit)(connection, audit.stream, audit.queue, audit.created)
