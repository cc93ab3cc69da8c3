"""The results of the scans of one queue's dead letters, and when the next scan is due."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from airflow_provider_jetstream.plugins.monitor.models.letters import ScanState
from airflow_provider_jetstream.plugins.monitor.queue_view import problem_of

if TYPE_CHECKING:
    import asyncio

    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
    from airflow_provider_jetstream.jetstream.dead_letters.table import LetterTable
    from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
    from airflow_provider_jetstream.jetstream.inspection.overview import QueueOverview
    from airflow_provider_jetstream.plugins.monitor.models.queues import LetterCounts, Problem

# The pause after a scan, as a multiple of the time that it took; most scans read only what changed.
_PAUSE_FACTOR = 4.0
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1.0, 15.0
_PAUSE_AFTER_FAILURE = 15.0
# A complete scan finds jobs that ended without an entry; each letter that is shown is proved again anyway.
_COMPLETE_SCAN_SECONDS = 900.0


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
        age = round(time.monotonic() - self.ended_at, 3) if self.counts else None
        if self.counts is None or (self.task and not self.completed_at):
            state: Literal["failed", "scanning"] = "failed" if self.error and not self.task else "scanning"
            return ScanState(state=state, problem=self.problem, seen=self.letters_seen, complete=False)
        complete = self.table.complete if self.table else False
        return ScanState(
            state="ready",
            problem=self.problem,
            scanned_at=self.counts.scanned_at,
            age_seconds=age,
            seen=self.letters_seen if self.task else 0,
            complete=complete,
        )

    def is_outdated(self, overview: QueueOverview, max_age: float, *, shown: bool) -> bool:
        """Return whether another scan may give another result.

        :param max_age: seconds after which it may while jobs come and go but no entry is added
        :param shown: whether a viewer requests single letters, and not just their number
        """
        if self.overview is None or (shown and self.scan is None and self.error is None):
            return True
        if self.overview.dead_letter_queue_state != overview.dead_letter_queue_state:
            return True
        if dead_in(self.overview) != dead_in(overview):
            return True
        return self.overview.fingerprint != overview.fingerprint and time.monotonic() - self.ended_at > max_age

    def can_reuse(self, next_scan: Scan) -> bool:
        """Return whether the indexed letters without a new entry needn't be read again by the next scan."""
        same_stream = self.scan is not None and self.scan.snapshot.created == next_scan.snapshot.created
        consistent = not next_scan.reconciliation.inconsistent_consumers
        recent = time.monotonic() - self.completed_at < _COMPLETE_SCAN_SECONDS
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
            return time.monotonic() - self.ended_at >= _PAUSE_AFTER_FAILURE
        seconds = self.counts.scan_seconds if self.counts else 0.0
        pause = min(max(_SHORTEST_PAUSE, _PAUSE_FACTOR * seconds), _LONGEST_PAUSE)
        return time.monotonic() - self.ended_at >= pause


def dead_in(overview: QueueOverview) -> int | None:
    """Return the number of dead letters among the stored jobs, if they were counted."""
    return overview.left_over.dead if overview.left_over else None
