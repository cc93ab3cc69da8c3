"""One task of a bulk redrive, run by a test in place of Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.spark.bulk_redrive.driver_supervision import scan_queue
from airflow_provider_jetstream.spark.bulk_redrive.task import PACKED_ENTRIES, RedriveTask
from airflow_provider_jetstream.spark.dead_letters.entry_table import pack_table
from testbed.spark_face import run_on_own_connection

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow_provider_jetstream.jetstream import RedriveReport, RedriveRequest, WorkQueue
    from airflow_provider_jetstream.spark.bulk_redrive.driver_supervision import DriverScan
    from testbed.spark_face import BlockingConnection


def begin_task(
    connection_options: dict[str, str],
    queue: WorkQueue,
    request: RedriveRequest,
    report: RedriveReport,
    lease_token: int | None = None,
) -> tuple[DriverScan, Callable[[pa.Table], pa.Table], pa.Table]:
    """Begin a run; return the driver's scan, a function that runs one task, and the rows of all letters."""
    scan = run_on_own_connection(connection_options, lambda connection: scan_queue(connection, queue, request))

    async def begin(connection: BlockingConnection) -> None:
        audit = AuditLog.from_snapshot(connection, queue, scan.scan.snapshot)
        assert audit is not None
        record = await audit.begin_run(str(request.run), request.who, request.why)
        async for letter in audit.letters_of_run(record.run, record.from_sequence):
            report.add_redriven(letter.sequence, letter.new_sequence, letter.new_stream)
            report.resumed += 1

    run_on_own_connection(connection_options, begin)
    task = RedriveTask(
        *(connection_options, scan.server_info, scan.scan.context, frozenset[str](), scan.acknowledged),
        *(request, scan.choice.protocol, None),
        lease_token=lease_token,
    )
    sequences = scan.jobs.column("sequence").to_pylist()
    entries = [pack_table(scan.jobs), *[None] * len(sequences)]
    jobs = pa.table({"sequence": [sequences[0], *sequences], PACKED_ENTRIES: pa.array(entries, pa.binary())})
    return scan, lambda rows: jobs.from_batches(list(task.run(iter(rows.to_batches())))), jobs
