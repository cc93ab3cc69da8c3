"""Tasks of a bulk redrive that fail, or find a changed server; a module, so that executors find it."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark import TaskContext

from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.spark.bulk_redrive.task import RedriveTask

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from airflow_provider_jetstream.jetstream.errors import ApiError, TransientError
    from testbed.face import LetterRecord

# The record of the audit whose write is prevented: by then some copies are recorded, and others only stored.
_FATAL_RECORD = 120


def _first_time(marker: str) -> bool:
    try:
        Path(marker).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class FailingTask(RedriveTask):
    """Raises after half of the letters, in the first attempt; the request's reason names the file that marks it."""

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Redrive the letters, or fail."""
        batches_with_rows = [batch for batch in batches if batch.num_rows]
        if batches_with_rows and _first_time(str(self.request.why)):
            half = batches_with_rows[0].slice(0, batches_with_rows[0].num_rows // 2)
            list(super().run(iter([half])))
            raise RuntimeError("half of the letters are redriven")
        yield from super().run(iter(batches_with_rows))


class KilledTask(RedriveTask):
    """Kills its process, in the first attempt, after new jobs are stored and before they are recorded."""

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Redrive the letters, or fail."""
        batches_with_rows = [batch for batch in batches if batch.num_rows]
        if batches_with_rows and _first_time(str(self.request.why)):
            written, write = 0, AuditLog.write

            async def write_or_die(
                self: AuditLog, records: Sequence[LetterRecord]
            ) -> list[ApiError | TransientError | None]:
                nonlocal written
                errors = await write(self, records[: max(_FATAL_RECORD - 1 - written, 0)])
                written += len(records)
                if written >= _FATAL_RECORD:
                    os.kill(os.getpid(), signal.SIGKILL)
                return errors

            AuditLog.write = write_or_die  # type: ignore[method-assign]
        yield from super().run(iter(batches_with_rows))


class RescannedTask(RedriveTask):
    """Finds that the server has restarted since the scan: every task does so, each time, where no reason is given.

    Otherwise only the task of the first letters does, at its first attempt; the reason names the file that marks it.
    """

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Redrive the letters, or leave them to another scan."""
        context, marker = TaskContext.get(), self.request.why
        assert context is not None
        if marker is None or (not context.partitionId() and _first_time(marker)):
            restarted = replace(self, server_info={**self.server_info, "server_id": "before"})
            return RedriveTask.run(restarted, batches)
        return super().run(batches)
