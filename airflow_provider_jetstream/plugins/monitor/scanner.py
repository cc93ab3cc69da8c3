"""Scans of queues' dead letters: shared by all viewers, one by one, each on no more than half of a core."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.dead_letters.entry import HIGHEST_JOB
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import EveryLetter
from airflow_provider_jetstream.jetstream.dead_letters.status import Status
from airflow_provider_jetstream.jetstream.dead_letters.table import LetterTable
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, TransientError
from airflow_provider_jetstream.jetstream.queue.discovery import known_queue
from airflow_provider_jetstream.plugins.monitor import clock
from airflow_provider_jetstream.plugins.monitor.queue_scan import LetterCounts, QueueScan, dead_in

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.inspection.overview import QueueOverview

# Beyond these, letters of a queue are only counted.
MAX_LETTERS = 1_000_000
_MAX_KINDS = 100_000
_MAX_CHANGED = 20_000
_COMPARED_AT_ONCE = 500
# The maximum age of a scan while jobs come and go but no entry is added.
_REQUESTED_MAX_AGE = 15.0
_BACKGROUND_MAX_AGE = 60.0
# Of all queues of a server; the table that was used longest ago is dropped first.
_MAX_LETTERS = 1_250_000
_LONGEST_PAUSE = 1.0
# Of deaths, which are counted for each.
_MINUTES = 60


class Scanner:
    """Scans the queues of one server.

    :param connection: opens the connection, or uses the open one
    """

    def __init__(self, connection: Callable[[], AbstractAsyncContextManager[Connection]]) -> None:
        self._connection = connection
        self._scans: dict[str, QueueScan] = {}
        self._overviews: Mapping[str, QueueOverview] = {}
        self._background: asyncio.Task[None] | None = None
        # The scan that a viewer requests doesn't wait for a large queue that is scanned in the background.
        self._requested_slot, self._background_slot = asyncio.Semaphore(1), asyncio.Semaphore(1)

    def scan_of(self, queue: str) -> QueueScan:
        """Return the scan of a queue, whatever its state."""
        return self._scans.setdefault(queue, QueueScan())

    def request_scan(self, overview: QueueOverview) -> QueueScan:
        """Return the scan of a queue, and start the next one if it is outdated."""
        scan = self.scan_of(overview.name)
        scan.used_at = clock.monotonic()
        if scan.task is None and scan.is_outdated(overview, _REQUESTED_MAX_AGE, shown=True) and scan.is_due():
            scan.task = asyncio.create_task(self._run(scan, overview, self._requested_slot))
        return scan

    async def settled(self, seconds: float) -> None:
        """Wait at most so long until the scans that are due have ended."""
        if self._background is not None and not self._background.done():
            await asyncio.wait({self._background}, timeout=seconds)

    async def wait_for_result(self, scan: QueueScan, seconds: float) -> None:
        """Wait at most so long for a scan that has no result yet."""
        if scan.task is not None and scan.scan is None:
            await asyncio.wait({scan.task}, timeout=seconds)

    def schedule_scans(self, overviews: Mapping[str, QueueOverview]) -> None:
        """Scan the queues that have changed, so that the snapshot has their numbers of dead letters.

        :param overviews: of all queues of the server
        """
        self._overviews = overviews
        for deleted in self._scans.keys() - overviews.keys():
            if (task := self._scans.pop(deleted).task) is not None:
                task.cancel()
        if self._background is None or self._background.done():
            self._background = asyncio.create_task(self._scan_in_background())

    async def _scan_in_background(self) -> None:
        """Scan one queue after the other, as long as no viewer requests a scan."""
        while not any(scan.task for scan in self._scans.values()) and (overview := self._next_outdated()) is not None:
            started, scan = clock.monotonic(), self.scan_of(overview.name)
            scan.task = asyncio.create_task(self._run(scan, overview, self._background_slot))
            await asyncio.wait({scan.task})
            await asyncio.sleep(min(_LONGEST_PAUSE, clock.monotonic() - started))

    def _next_outdated(self) -> QueueOverview | None:
        for name, overview in sorted(self._overviews.items(), key=lambda item: self.scan_of(item[0]).ended_at):
            scan = self.scan_of(name)
            if overview.dead_letter_queue is None:
                continue
            if not _may_hold_letters(overview, scan):
                scan.overview, scan.counts = overview, LetterCounts(clock.monotonic(), clock.now())
            elif scan.is_outdated(overview, _BACKGROUND_MAX_AGE, shown=False) and scan.is_due():
                return overview
        return None

    def drop_connection(self) -> None:
        """Drop everything that uses the connection."""
        if self._background is not None:
            self._background.cancel()
        for scan in self._scans.values():
            scan.scan = None
            if scan.task is not None:
                scan.task.cancel()
                scan.task = None

    async def _run(self, scan: QueueScan, overview: QueueOverview, slot: asyncio.Semaphore) -> None:
        try:
            async with slot, self._connection() as connection:
                await self._scan(connection, overview, scan)
            scan.overview, scan.error = overview, None
        except TransientError as error:
            scan.error = error
        except JetStreamProviderError as error:
            # A terminal error stays until the queue changes.
            scan.overview, scan.error = overview, error
        finally:
            scan.ended_at, scan.task = clock.monotonic(), None
            self._drop_tables()

    async def _scan(self, connection: Connection, overview: QueueOverview, queue_scan: QueueScan) -> None:
        started, queue_scan.letters_seen = clock.monotonic(), 0
        queue = await known_queue(connection, overview.name)
        scan = await Scan.begin(connection, queue, since=queue_scan.continued_scan())
        table = await self._update_table(queue_scan, scan) if queue_scan.can_reuse(scan) else None
        if table is None:
            table = await self._read_all(queue_scan, scan)
        queue_scan.table, queue_scan.scan, queue_scan.risks = table, scan, scan.risks
        first = int(scan.now.timestamp() // 60) - _MINUTES
        deaths = await table.deaths(datetime.fromtimestamp(first * 60, UTC), 60, _MINUTES + 1)
        queue_scan.counts = LetterCounts(
            began=started,
            ended_at=clock.now(),
            seconds=round(clock.monotonic() - started, 3),
            certain=table.counted[False],
            uncertain=scan.uncertain,
            parked=table.counted[True],
            lost=scan.dismissed[Status.LOST],
            complete=table.complete,
            deaths={first + minute: count for minute, count in deaths.items()},
        )

    async def _read_all(self, queue_scan: QueueScan, scan: Scan) -> LetterTable:
        """Read each letter; what was known before is changed as far as it isn't the same."""
        table = queue_scan.table if queue_scan.has_all_letters else None
        table = LetterTable(MAX_LETTERS, _MAX_KINDS) if table is None else table
        if not queue_scan.completed_at:
            # People see the first letters while the others are being read.
            queue_scan.table, queue_scan.scan = table, scan
        last = 0
        async for page in _throttled_pages(scan, EveryLetter()):
            if page:
                await table.replace(last, page[-1].sequence, page, scan.snapshot)
                last = page[-1].sequence
            queue_scan.letters_seen += len(page)
        await table.replace(last, HIGHEST_JOB, (), scan.snapshot)
        queue_scan.completed_at = clock.monotonic()
        return table

    async def _update_table(self, queue_scan: QueueScan, scan: Scan) -> LetterTable | None:
        """Read only jobs with new entries; return ``None`` where there are too many of those."""
        table = queue_scan.table
        found = None if table is None else await _compare(table, scan)
        if table is None or found is None or len(table) + len(found[0]) > MAX_LETTERS:
            return None
        changed, gone = found
        gone |= changed
        async for page in _throttled_pages(scan, EveryLetter(sequences=frozenset(changed))):
            await table.change(page, scan.snapshot)
            gone.difference_update(letter.sequence for letter in page)
            queue_scan.letters_seen += len(page)
        await table.change((), scan.snapshot, gone)
        return table

    def _drop_tables(self) -> None:
        known = sorted((scan for scan in self._scans.values() if scan.table), key=lambda scan: -scan.used_at)
        total = 0
        for scan in known:
            total += len(scan.table or ())
            if total > _MAX_LETTERS and scan is not known[0]:
                scan.table = scan.scan = None


async def _compare(table: LetterTable, scan: Scan) -> tuple[set[int], set[int]] | None:
    """Return which jobs have to be read, and what is no letter any more as far as that is known.

    :return: ``None`` where too many have to be read
    """
    # Jobs without an entry are read each time.
    changed, gone, after = {*scan.reconciliation.orphans}, set[int](), 0
    jobs, worked = scan.index.jobs(), time.thread_time()
    while some := dict(islice(jobs, _COMPARED_AT_ONCE)):
        until = max(some)
        known = await table.entries(after, until)
        changed.update(sequence for sequence, entries in some.items() if known.get(sequence) != _last(entries))
        gone |= known.keys() - some.keys()
        if len(changed) > _MAX_CHANGED:
            return None
        after = until
        await asyncio.sleep(time.thread_time() - worked)
        worked = time.thread_time()
    return changed, gone | (await table.entries(after, HIGHEST_JOB)).keys()


async def _throttled_pages(scan: Scan, selection: EveryLetter) -> AsyncGenerator[tuple[DeadLetter, ...], None]:
    worked = time.thread_time()
    async for page in scan.pages(selection):
        yield page.letters
        # The other half of the core is the API server's, whose threads share one interpreter lock.
        await asyncio.sleep(time.thread_time() - worked)
        worked = time.thread_time()


def _may_hold_letters(overview: QueueOverview, scan: QueueScan) -> bool:
    entries = overview.dead_letter_queue["state"]["messages"] if overview.dead_letter_queue else 0
    return bool(entries or dead_in(overview) != 0 or (scan.counts and (scan.counts.certain or scan.counts.uncertain)))


def _last(entries: tuple[Entry, ...]) -> int:
    return max((entry.sequence for entry in entries), default=0)
