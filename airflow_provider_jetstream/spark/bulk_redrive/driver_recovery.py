"""Finishes what redrives began that were cut off, before the tasks of a bulk redrive begin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.archive import ArchiveReader
from airflow_provider_jetstream.jetstream.audit.intent import IntentLog
from airflow_provider_jetstream.jetstream.redrive.recovery import recover
from airflow_provider_jetstream.jetstream.redrive.steps import Steps
from airflow_provider_jetstream.spark.bulk_redrive.driver_scan import audit_log

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow_provider_jetstream.jetstream.audit.lease import Lease
    from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest
    from airflow_provider_jetstream.spark.bulk_redrive.driver_scan import DriverScan


async def recover_letters(
    connection: BlockingConnection,
    driver_scan: DriverScan,
    request: RedriveRequest,
    report: RedriveReport,
    lease: Lease,
    wave: int | None = None,
) -> Mapping[int, str]:
    """Finish the letters of redrives that were cut off, and add them to the report.

    :param wave: the wave that begins, if there are waves
    :return: the letters of which it isn't known whether they have new jobs, and why
    :raises LeaseLostError: somebody else has the lease
    """
    scan = driver_scan.scan
    audit = audit_log(connection, driver_scan, lease.token)
    intents = IntentLog(connection, audit, lease.operation)

    async def classify(sequences: list[int]) -> Sequence[DeadLetter | NotDead]:
        reader = await scan.context.reader(
            connection,
            scan.index,
            archive=await ArchiveReader.open(connection, scan.queue, scan.snapshot.info),
            audit=audit,
            inconsistent_consumers=scan.reconciliation.inconsistent_consumers,
        )
        return await reader.classify([(sequence, scan.index.entries_of(sequence)) for sequence in sequences])

    steps = Steps(
        *(connection, scan.queue, scan.snapshot, request, intents, report),
        removes_entries=False,
    )
    steps.records.wave = wave
    # The repairs are in the frame: a letter isn't stored once more without its own.
    await recover(connection, scan.context, classify, steps, intents, lease.open_since, can_repeat=False)
    lease.open_since = intents.open_since
    return steps.set_aside
