"""Scans of queues' dead letters: shared by all viewers, one by one, each on no more than half of a core."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Literal, TypeAlias

from airflow_provider_jetstream.jetstream.dead_letters.entry import HIGHEST_JOB
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import EveryLetter
from airflow_provider_jetstream.jetstream.dead_letters.status import Status
from airflow_provider_jetstream.jetstream.dead_letters.table import LetterTable
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, TransientError
from airflow_provider_jetstream.jetstream.queue.discovery import known_queue
from airflow_provider_jetstream.plugins.monitor import clock
from airflow_provider_jetstream.plugins.monitor.models.figure import UNKNOWN, figure
from airflow_provider_jetstream.plugins.monitor.models.letters import ScanState
from airflow_provider_jetstream.plugins.monitor.models.queues import NewestCause
from airflow_provider_jetstream.plugins.monitor.queue_view import LetterFigures, problem_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry
    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.inspection.overview import QueueOverview
    from airflow_provider_jetstream.plugins.monitor.models.figure import Certainty, Figure
    from airflow_provider_jetstream.plugins.monitor.models.queues import Problem


# The pause after a scan, as a multiple of the time that it took; most scans read only what changed.
_PAUSE_FACTOR = 4.0
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1.0, 15.0
_PAUSE_AFTER_FAILURE = 15.0
# A complete scan finds jobs that ended without an entry; each letter that is shown is proved again anyway.
_COMPLETE_SCAN_SECONDS = 900.0

# Seconds after which a scan counts as an old one if something has changed since.
_OLD_SECONDS = 30.0
_RECENT_MINUTES = 5
_BINS, _BIN_MINUTES = 12, 5
Owners: TypeAlias = "Mapping[str, str | None]"


@dataclass(frozen=True, slots=True)
class LetterCounts:
    """The counts of one scan.

    :param began: when it began, by the page's clock
    :param ended_at: when it ended
    :param seconds: how long it took
    :param certain: proved dead letters in circulation
    :param uncertain: jobs that may be dead but aren't proved yet
    :param parked: taken out of circulation
    :param lost: dead letters whose body wasn't preserved, so that they can't be redriven
    :param complete: whether the table holds all of them
    :param deaths: how many of the last hour's letters died in each minute, by minutes since 1970
    :param newest: the newest cause of each DAG's letters, the newest first
    """

    began: float
    ended_at: datetime
    seconds: float = 0.0
    certain: int = 0
    uncertain: int = 0
    parked: int = 0
    lost: int = 0
    complete: bool = True
    deaths: Mapping[int, int] = field(default_factory=dict)
    newest: tuple[NewestCause, ...] = ()

    def deaths_of_hour(self, now: datetime) -> list[int]:
        """Return how many of the letters died in each five minutes of the last hour, oldest first; none if none."""
        bins, minute = [0] * _BINS, int(now.timestamp() // 60)
        for at, count in self.deaths.items():
            if 0 <= minute - at < _BINS * _BIN_MINUTES:
                bins[-1 - (minute - at) // _BIN_MINUTES] += count
        return bins if any(bins) else []

    def newest_cause(self, owners: Owners) -> NewestCause | None:
        """Return the newest cause that a user may see, with the team of its DAG.

        :param owners: the DAGs that the user may see, and their teams
        """
        for cause in self.newest:
            if cause.dag_id is None:
                return cause
            if cause.dag_id in owners:
                return cause.model_copy(update={"team": owners[cause.dag_id]})
        return None


@dataclass(slots=True)
class QueueScan:
    """The state of the scans of one queue.

    :param overview: of the queue when the last scan began
    :param table: the letters of the last scan that ended
    :param scan: that scan, with which single letters can be proved again; ``None`` where its connection is gone
    :param counts: its counts
    :param error: of the last scan, if it failed
    :param letters_seen: letters that the running scan has seen
    :param task: the running scan
    :param used_at: when a viewer last requested it
    :param completed_at: when a scan last read every letter
    """

    overview: QueueOverview | None = None
    table: LetterTable | None = None
    scan: Scan | None = None
    counts: LetterCounts | None = None
    error: JetStreamProviderError | None = None
    letters_seen: int = 0
    task: asyncio.Task[None] | None = None
    used_at: float = 0.0
    ended_at: float = 0.0
    completed_at: float = 0.0
    risks: tuple[str, ...] = ()

    @property
    def problem(self) -> Problem | None:
        """The error of the last scan, for people."""
        return problem_of(self.error) if self.error else None

    def state(self) -> ScanState:
        """Return the progress of the scans, as the page shows it."""
        if self.counts is None or (self.task and not self.completed_at):
            state: Literal["failed", "scanning"] = "failed" if self.error and not self.task else "scanning"
            return ScanState(state=state, problem=self.problem, seen=self.letters_seen, complete=False)
        return ScanState(
            state="ready",
            problem=self.problem,
            scanned_at=self.counts.ended_at,
            age_seconds=round(age_of(self.counts), 3),
            seen=self.letters_seen if self.task else 0,
            complete=self.counts.complete,
        )

    def certainty(self, overview: QueueOverview, viewed_since: float) -> Certainty:
        """Return whether the scan's numbers are current, or ``old`` ones.

        :param viewed_since: since when somebody looks: what was read before is old where something has changed since
        """
        if self.counts is None:
            return "unknown"
        if self.is_of(overview):
            return "exact"
        recent = clock.monotonic() - self.counts.began < _OLD_SECONDS and self.counts.began >= viewed_since
        return "exact" if recent else "old"

    def figure(self, value: float, overview: QueueOverview, viewed_since: float) -> Figure:
        """Return a number that was counted in the table of the scan's letters."""
        if self.counts is None:
            return figure(value, 0.0, "at_least") if self.table else UNKNOWN
        certainty = self.certainty(overview, viewed_since)
        incomplete = certainty == "exact" and not self.counts.complete
        return figure(value, age_of(self.counts), "at_least" if incomplete else certainty)

    def figures(self, overview: QueueOverview, viewed_since: float, age: float | None, now: datetime) -> LetterFigures:
        """Return what is known of the letters.

        :param age: of the overview, in seconds
        :param now: by the server's clock
        """
        if overview.dead_letter_queue is None or self.counts is None:
            return LetterFigures(dead=figure(dead_in(overview), age, "about"))
        counts, certainty = self.counts, self.certainty(overview, viewed_since)
        minute = int(now.timestamp() // 60)
        recent = sum(count for at, count in counts.deaths.items() if minute - _RECENT_MINUTES < at <= minute)
        numbers = (counts.certain, counts.uncertain, counts.parked, counts.lost)
        # An old scan tells nothing of the last minutes.
        rate = None if certainty == "old" else round(recent / _RECENT_MINUTES, 2)
        return LetterFigures(*(figure(number, age_of(counts), certainty) for number in (*numbers, rate)))

    def is_of(self, overview: QueueOverview) -> bool:
        """Return whether no entry has come or gone since the last scan, and the same number of jobs is dead."""
        return (
            self.overview is not None
            and self.overview.dead_letter_queue_state == overview.dead_letter_queue_state
            and dead_in(self.overview) == dead_in(overview)
        )

    def is_outdated(self, overview: QueueOverview, max_age: float, *, shown: bool) -> bool:
        """Return whether another scan may give another result.

        :param max_age: seconds after which it may while jobs come and go but no entry is added
        :param shown: whether a viewer requests single letters, and not just their number
        """
        if self.overview is None or (shown and self.scan is None and self.error is None):
            return True
        if not self.is_of(overview):
            return True
        return self.overview.fingerprint != overview.fingerprint and clock.monotonic() - self.ended_at > max_age

    def can_reuse(self, next_scan: Scan) -> bool:
        """Return whether the indexed letters without a new entry needn't be read again by the next scan."""
        same_stream = self.scan is not None and self.scan.snapshot.created == next_scan.snapshot.created
        consistent = not next_scan.reconciliation.inconsistent_consumers
        recent = clock.monotonic() - self.completed_at < _COMPLETE_SCAN_SECONDS
        return same_stream and consistent and recent and self.counts is not None and self.has_all_letters

    @property
    def has_all_letters(self) -> bool:
        """Whether an earlier scan has indexed all letters that there were."""
        return bool(self.completed_at and self.table is not None and self.table.complete)

    def continued_scan(self) -> Scan | None:
        """Return the earlier scan whose entries needn't be read again; ``None`` where most of them are of no use."""
        if not self.completed_at or self.scan is None or 2 * self.scan.index.drops > len(self.scan.index):
            return None
        return self.scan

    def is_due(self) -> bool:
        """Return whether the pause after the last scan is over."""
        if self.error:
            return clock.monotonic() - self.ended_at >= _PAUSE_AFTER_FAILURE
        seconds = self.counts.seconds if self.counts else 0.0
        pause = min(max(_SHORTEST_PAUSE, _PAUSE_FACTOR * seconds), _LONGEST_PAUSE)
        return clock.monotonic() - self.ended_at >= pause


def age_of(counts: LetterCounts) -> float:
    """Return how old the counts are: as of the beginning of their scan."""
    return clock.monotonic() - counts.began


def dead_in(overview: QueueOverview) -> int | None:
    """Return the number of dead letters among the stored jobs, if they were counted."""
    return overview.left_over.dead if overview.left_over else None


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
_CAUSE: tuple[GroupField, ...] = ("reason", "error_class", "error_place", "dag_id")
_MOST_CAUSES = 100
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
        """Wait, up to a time limit, until the scans that are due have ended."""
        if self._background is not None and not self._background.done():
            await asyncio.wait({self._background}, timeout=seconds)

    async def wait_for_result(self, scan: QueueScan, seconds: float) -> None:
        """Wait, up to a time limit, for a scan that has no result yet."""
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
            newest=await _newest_causes(table),
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


async def _newest_causes(table: LetterTable) -> tuple[NewestCause, ...]:
    """Return the newest cause of each DAG's letters, the newest first."""
    found: dict[str | None, NewestCause] = {}
    for (reason, error_class, error_place, dag_id), died_at in await table.newest(_CAUSE, _MOST_CAUSES):
        cause = NewestCause(
            reason=reason or "", error_class=error_class, error_place=error_place, dag_id=dag_id, died_at=died_at
        )
        found.setdefault(cause.dag_id, cause)
    return tuple(found.values())


def _last(entries: tuple[Entry, ...]) -> int:
    return max((entry.sequence for entry in entries), default=0)
