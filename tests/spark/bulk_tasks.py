"""One task of a bulk redrive, run by a test in place of Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from airflow_provider_jetstream.jetstream import Selection
from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.redrive.request import Protocol
from airflow_provider_jetstream.spark.bulk_redrive.task import PACKED_ENTRIES, RedriveTask
from airflow_provider_jetstream.spark.dead_letters.scanned_jobs import ScannedJobs
from testbed.face import Scan
from testbed.spark_face import run_on_own_connection

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow_provider_jetstream.jetstream import RedriveReport, RedriveRequest, WorkQueue
    from testbed.spark_face import BlockingConnection


def begin_task(
    connection_options: dict[str, str],
    queue: WorkQueue,
    request: RedriveRequest,
    report: RedriveReport,
    lease_token: int | None = None,
) -> tuple[Callable[[pa.Table], pa.Table], pa.Table]:
    """Begin a run; return a function that runs one task, and the rows of all letters."""

    async def begin(connection: BlockingConnection) -> tuple[RedriveTask, ScannedJobs]:
        await connection.discover_capabilities(stream.name for stream in (queue, *queue.companions()))
        scan = await Scan.begin(connection, queue)
        audit = AuditLog.from_snapshot(connection, queue, scan.snapshot)
        assert audit is not None
        record = await audit.begin_run(str(request.run), request.who, request.why)
        async for letter in audit.letters_of_run(record.run, record.from_sequence):
            report.add_redriven(letter.sequence, letter.new_sequence, letter.new_stream)
            report.resumed += 1
        info = dict(connection.socket.server_info)
        task = RedriveTask(
            *(connection_options, info, scan.context, frozenset[str](), await scan.acknowledgements()),
            *(request, Protocol.COPY, None),
            lease_token=lease_token,
        )
        return task, await ScannedJobs.of_scan(scan, Selection())

    task, scanned = run_on_own_connection(connection_options, begin)
    sequences = [*scanned.sequences]
    entries = [scanned.part(0, len(scanned)), *[None] * len(sequences)]
    jobs = pa.table({"sequence": [sequences[0], *sequences], PACKED_ENTRIES: pa.array(entries, pa.binary())})
    return lambda rows: jobs.from_batches(list(task.run(iter(rows.to_batches())))), jobs
