"""The results of the scans of one queue's dead letters, and when the next scan is due."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from airflow_provider_jetstream.plugins.monitor import clock
from airflow_provider_jetstream.plugins.monitor.models.figure import UNKNOWN, figure
from airflow_provider_jetstream.plugins.monitor.models.letters import ScanState
from airflow_provider_jetstream.plugins.monitor.queue_view import LetterFigures, problem_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
    from airflow_provider_jetstream.jetstream.dead_letters.table import LetterTable
    from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
    from airflow_provider_jetstream.jetstream.inspection.overview import QueueOverview
    from airflow_provider_jetstream.plugins.monitor.models.figure import Certainty, Figure
    from airflow_provider_jetstream.plugins.monitor.models.queues import Problem

# The pause after a scan, as a multiple of the time that it took; most scans read only what changed.
_PAUSE_FACTOR = 4.0
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1.0, 15.0
_PAUSE_AFTER_FAILURE = 15.0
# A complete scan finds jobs that ended without an entry; each letter that is shown is proved again anyway.
_COMPLETE_SCAN_SECONDS = 900.0

# A scan that ended so long ago is an old one where something has changed since.
_OLD_SECONDS = 30.0
_RECENT_MINUTES = 5


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
        """Return whether the scan's numbers are those of now, or ``old`` ones.

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
