"""How many jobs of a queue died when: from the times that the server stored, so that nobody need have watched."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.audit.records import (
    LetterRecord,
    parse_record,
)
from airflow_provider_jetstream.jetstream.client.streams import read_range
from airflow_provider_jetstream.jetstream.contract import letter_audit_subject
from airflow_provider_jetstream.plugins.monitor.job_ends import first_since
from airflow_provider_jetstream.plugins.monitor.models.history import Deaths

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from airflow_provider_jetstream.jetstream.audit.log import AuditLog
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.plugins.monitor.queue_scan import QueueScan

_STEPS = 180
_MAX_RECORDS = 20_000
_SAME_TIME = timedelta(milliseconds=1)


async def read_deaths(scan: QueueScan, since: datetime, until: datetime) -> tuple[list[Deaths], datetime | None]:
    """Count the deaths of a time.

    :param scan: of the queue's letters; those that were redriven since are found in the audit
    :return: the counts, and since when they are complete; ``None`` where all are
    """
    if scan.table is None:
        return [], until
    seconds = max(1.0, (until - since).total_seconds() / _STEPS)
    start = since.timestamp()
    # With one step more, for letters that died since that time was read.
    counts = Counter(await scan.table.deaths(since, seconds, _STEPS + 1))
    known_since = None if scan.table.complete else until
    if scan.scan is not None and scan.scan.audit is not None:
        # Concurrent redrives may record a letter twice.
        read: set[tuple[int, datetime]] = set()
        async for record in _redriven(scan.scan.connection, scan.scan.audit, since):
            read.add(record)
            if len(read) > _MAX_RECORDS:
                known_since = until
                break
        present = await scan.table.died_at({sequence for sequence, _ in read})
        for sequence, died_at in read:
            is_present = abs(present.get(sequence, datetime.min.replace(tzinfo=UTC)) - died_at) < _SAME_TIME
            if since <= died_at < until and not is_present:
                counts[int((died_at.timestamp() - start) // seconds)] += 1
    return [
        Deaths(at=datetime.fromtimestamp(start + step * seconds, UTC), seconds=seconds, count=count)
        for step, count in sorted(counts.items())
    ], known_since


async def _redriven(
    connection: Connection, audit: AuditLog, since: datetime
) -> AsyncGenerator[tuple[int, datetime], None]:
    """Read which letters the audit has records about that are younger than a time, and when these letters died."""
    start = await first_since(connection, audit.stream, since)
    one = letter_audit_subject(audit.queue, 0).removesuffix("0") + "*"
    async for message in read_range(connection, audit.stream, one, start):
        record = parse_record(LetterRecord, message)
        if record and record.created == audit.created and record.died_at:
            yield record.sequence, record.died_at
