"""Shares of a bulk redrive that end early, once, wherever their task runs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.spark.bulk_redrive.task import RedriveTask

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from airflow_provider_jetstream.jetstream.audit.log import LetterRecord

# Which write to the audit comes too late: some letters are done then, and some stored but not recorded.
_LATE = 120


def _first_time(marker: str) -> bool:
    try:
        Path(marker).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class FailingShare(RedriveTask):
    """Raises after half of the letters; the file to be made by who comes first is named as the reason."""

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Bring letters back, or only some."""
        whole = [batch for batch in batches if batch.num_rows]
        if whole and _first_time(str(self.request.why)):
            half = whole[0].slice(0, whole[0].num_rows // 2)
            list(super().run(iter([half])))
            raise RuntimeError("half is done")
        yield from super().run(iter(whole))


class KilledShare(RedriveTask):
    """Is killed where new jobs are stored that nobody has recorded."""

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Bring letters back, or only some."""
        whole = [batch for batch in batches if batch.num_rows]
        if whole and _first_time(str(self.request.why)):
            written, write = [], AuditLog.write

            async def write_and_die(audit: AuditLog, record: LetterRecord) -> None:
                written.append(record)
                if len(written) == _LATE:
                    os.kill(os.getpid(), signal.SIGKILL)
                await write(audit, record)

            AuditLog.write = write_and_die  # type: ignore[method-assign]
        yield from super().run(iter(whole))
