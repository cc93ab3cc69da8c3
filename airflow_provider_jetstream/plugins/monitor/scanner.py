"""Scans of queues' dead letters: shared by all viewers, one by one, each on no more than half of a core."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.readahead import read_ahead
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import EveryLetter
from airflow_provider_jetstream.jetstream.dead_letters.status import Status
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, TransientError
from airflow_provider_jetstream.jetstream.queue.discovery import known_queue
from airflow_provider_jetstream.plugins.monitor.indexed_letter import IndexedLetter
from airflow_provider_jetstream.plugins.monitor.letter_index import MAX_LETTERS, LetterIndex
from airflow_provider_jetstream.plugins.monitor.models.queues import LetterCounts
from airflow_provider_jetstream.plugins.monitor.queue_scan import QueueScan, dead_in

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.inspection.overview import QueueOverview

_MAX_CHANGED = 20_000
_COMPARED_AT_ONCE = 500
_FEW_ENTRIES = 50
# The maximum age of a scan while jobs come and go but no entry is added.
_REQUESTED_MAX_AGE = 15.0
_BACKGROUND_MAX_AGE = 60.0
# Of all queues of a server; the index that was used longest ago is dropped first.
_MAX_LETTERS = 1_250_000
_PAGE_BYTES = 8 * 2**20
_SMALLEST_PAGE = 8
_LONGEST_PAUSE = 1.0


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
        scan.used_at = time.monotonic()
        if scan.task is None and scan.is_outdated(overview, _REQUESTED_MAX_AGE, shown=True) and scan.is_due():
            scan.task = asyncio.create_task(self._run(scan, overview, self._requested_slot))
        return scan

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
            started, scan = time.monotonic(), self.scan_of(overview.name)
            scan.task = asyncio.create_task(self._run(scan, overview, self._background_slot))
            await asyncio.wait({scan.task})
            await asyncio.sleep(min(_LONGEST_PAUSE, time.monotonic() - started))

    def _next_outdated(self) -> QueueOverview | None:
        for name, overview in sorted(self._overviews.items(), key=lambda item: self.scan_of(item[0]).ended_at):
            scan = self.scan_of(name)
            if overview.dead_letter_queue is None:
                continue
            if not _may_hold_letters(overview, scan):
                scan.counts = _counts(LetterIndex())
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
            scan.ended_at, scan.task = time.monotonic(), None
            self._drop_indexes()

    async def _scan(self, connection: Connection, overview: QueueOverview, queue_scan: QueueScan) -> None:
        started, queue_scan.letters_seen = time.monotonic(), 0
        queue = await known_queue(connection, overview.name)
        # Which streams can be read ahead takes a list of all streams, so it pays only with many entries.
        letters = overview.dead_letter_queue
        if letters is not None and letters["state"]["messages"] > _FEW_ENTRIES:
            connection = await read_ahead(connection, queue.name, queue.companion_names())
        scan = await Scan.begin(connection, queue, since=queue_scan.continued_scan())
        scan.page_size = _page_size(scan)
        index = await self._update_index(queue_scan, scan) if queue_scan.can_reuse(scan) else None
        if index is None:
            index = await self._read_all(queue_scan, scan)
        queue_scan.index, queue_scan.scan, queue_scan.risks = index, scan, scan.risks
        seconds, lost = time.monotonic() - started, scan.dismissed[Status.LOST]
        queue_scan.counts = _counts(index, scan.uncertain, seconds, lost)

    async def _read_all(self, queue_scan: QueueScan, scan: Scan) -> LetterIndex:
        """Read and index each letter; what was indexed before is changed as far as it isn't the same."""
        index = queue_scan.index if queue_scan.index and queue_scan.has_all_letters else LetterIndex()
        if not queue_scan.completed_at:
            # People see the first letters while the others are being read.
            queue_scan.index, queue_scan.scan = index, scan
        # Letters that are added go behind these.
        before, known, seen = index.columns.sequence, len(index), 0
        changes: dict[int, IndexedLetter | None] = {}
        async for page in _throttled_pages(scan, EveryLetter()):
            for letter in page:
                indexed = IndexedLetter.of(letter)
                while seen < known and before[seen] <= letter.sequence:
                    if before[seen] < letter.sequence:
                        changes[before[seen]] = None
                    seen += 1
                if letter.sequence > index.last:
                    index.add(letter.sequence, indexed)
                elif index.differs(letter.sequence, indexed):
                    changes[letter.sequence] = indexed
            queue_scan.letters_seen += len(page)
        changes |= dict.fromkeys(before[seen:known])
        if changes:
            await index.change(changes)
        queue_scan.completed_at = time.monotonic()
        return index

    async def _update_index(self, queue_scan: QueueScan, scan: Scan) -> LetterIndex | None:
        """Index the letters, reading only jobs with new entries; ``None`` where there are too many of those."""
        index = queue_scan.index or LetterIndex()
        orphans = set(scan.reconciliation.orphans)
        found = await _compare(index, scan, orphans)
        if found is None:
            return None
        changed, changes = found
        if len(index) + len(changed) > MAX_LETTERS:
            return None
        async for page in _throttled_pages(scan, EveryLetter(sequences=frozenset(changed))):
            changes |= {letter.sequence: IndexedLetter.of(letter) for letter in page}
            queue_scan.letters_seen += len(page)
        if changes:
            await index.change(changes)
        return index

    def _drop_indexes(self) -> None:
        indexed = sorted((scan for scan in self._scans.values() if scan.index), key=lambda scan: -scan.used_at)
        total = 0
        for scan in indexed:
            total += len(scan.index or ())
            if total > _MAX_LETTERS and scan is not indexed[0]:
                scan.index = scan.scan = None


async def _compare(
    index: LetterIndex, scan: Scan, orphans: set[int]
) -> tuple[set[int], dict[int, IndexedLetter | None]] | None:
    """Return which jobs have to be read, and what is no letter any more as far as that is known.

    :param orphans: jobs without an entry, which are read each time
    :return: ``None`` where too many have to be read
    """
    changed, gone = set(orphans), dict[int, IndexedLetter | None]()
    sequences, position = index.columns.sequence, 0
    worked = time.thread_time()
    for number, (sequence, entries) in enumerate(scan.index.jobs(), 1):
        while position < len(sequences) and sequences[position] < sequence:
            gone[sequences[position]] = None
            position += 1
        if position < len(sequences) and sequences[position] == sequence:
            position += 1
        if not index.has(sequence, _last(entries)):
            changed.add(sequence)
        if len(changed) > _MAX_CHANGED:
            return None
        if number % _COMPARED_AT_ONCE == 0:
            await asyncio.sleep(time.thread_time() - worked)
            worked = time.thread_time()
    gone |= dict.fromkeys([*sequences[position:], *changed])
    return changed, gone


async def _throttled_pages(scan: Scan, selection: EveryLetter) -> AsyncGenerator[tuple[DeadLetter, ...], None]:
    worked = time.thread_time()
    async for page in scan.pages(selection):
        yield page.letters
        # The other half of the core is the API server's, whose threads share one interpreter lock.
        await asyncio.sleep(time.thread_time() - worked)
        worked = time.thread_time()


def _counts(index: LetterIndex, uncertain: int = 0, seconds: float = 0.0, lost: int = 0) -> LetterCounts:
    return LetterCounts(
        certain=index.counted[False],
        uncertain=uncertain,
        parked=index.counted[True],
        lost=lost,
        complete=index.complete,
        scanned_at=datetime.now(UTC),
        scan_seconds=round(seconds, 3),
    )


def _may_hold_letters(overview: QueueOverview, scan: QueueScan) -> bool:
    entries = overview.dead_letter_queue["state"]["messages"] if overview.dead_letter_queue else 0
    return bool(entries or dead_in(overview) != 0 or (scan.counts and (scan.counts.certain or scan.counts.uncertain)))


def _last(entries: tuple[Entry, ...]) -> int:
    return max((entry.sequence for entry in entries), default=0)


def _page_size(scan: Scan) -> int:
    state = scan.snapshot.state
    average = state["bytes"] // state["messages"] if state["messages"] else 0
    return max(_SMALLEST_PAGE, min(scan.page_size, _PAGE_BYTES // (average or 1)))
