"""What is known of one queue's dead letters, and whether another look would find something else."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from airflow_provider_jetstream.plugins.monitor.models import LetterCounts, Problem, ScanState
from airflow_provider_jetstream.plugins.monitor.queue_view import problem_of

if TYPE_CHECKING:
    import asyncio

    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
    from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
    from airflow_provider_jetstream.jetstream.inspection.overview import QueueOverview
    from airflow_provider_jetstream.plugins.monitor.letter_index import LetterIndex

# A scan is taken again at the earliest after so many times the time that it took; most look only at what changed.
_REST = 4.0
_LEAST_REST, _LONGEST_REST = 1.0, 15.0
_FAILED_REST = 15.0
# Jobs that ended without a word are found out then; each that is shown is proved again anyway.
_FULL_AGAIN = 900.0


@dataclass(slots=True)
class QueueScan:
    """What is known of one queue's dead letters.

    :param seen_of: the last look at the queue when the scan began
    :param index: the letters of the last scan that ended
    :param scan: that scan, with which single letters can be proved again; ``None`` where its connection is gone
    :param counts: what it found
    :param error: why the last one failed
    :param seen: letters that the running one has seen
    :param running: the running one
    :param used_at: when somebody last asked for it
    """

    seen_of: QueueOverview | None = None
    index: LetterIndex | None = None
    scan: Scan | None = None
    counts: LetterCounts | None = None
    error: JetStreamProviderError | None = None
    seen: int = 0
    running: asyncio.Task[None] | None = None
    used_at: float = 0.0
    ended_at: float = 0.0
    full_at: float = 0.0
    risks: tuple[str, ...] = ()

    @property
    def problem(self) -> Problem | None:
        """Why the last one failed, for people."""
        return problem_of(self.error) if self.error else None

    def state(self) -> ScanState:
        """Tell how far it is.

        :return: what the page shows of it
        """
        age = round(time.monotonic() - self.ended_at, 3) if self.counts else None
        if self.counts is None or (self.running and not self.full_at):
            state: Literal["failed", "scanning"] = "failed" if self.error and not self.running else "scanning"
            return ScanState(state=state, problem=self.problem, seen=self.seen, complete=False)
        complete = self.index.complete if self.index else False
        return ScanState(
            state="ready",
            problem=self.problem,
            scanned_at=self.counts.scanned_at,
            age_seconds=age,
            seen=self.seen if self.running else 0,
            complete=complete,
        )

    def outdated(self, look: QueueOverview, seconds: float, *, shown: bool) -> bool:
        """Tell whether another would find something else.

        :param look: the last look at the queue
        :param seconds: how old it may become while jobs come and go, but nothing is said about deaths
        :param shown: whether single letters are asked for, and not just how many there are
        :return: whether it would
        """
        if self.seen_of is None or (shown and self.scan is None and self.error is None):
            return True
        if (self.seen_of.dead_letter_queue_state, dead_in(self.seen_of)) != (
            look.dead_letter_queue_state,
            dead_in(look),
        ):
            return True
        return self.seen_of.fingerprint != look.fingerprint and time.monotonic() - self.ended_at > seconds

    def may_carry_over(self, looked: Scan) -> bool:
        """Tell whether what the last scan found still counts where nothing was said since.

        :param looked: the look that has begun
        :return: whether it does
        """
        same = self.scan is not None and self.scan.snapshot.created == looked.snapshot.created
        sure = not looked.reconciliation.inconsistent_consumers and time.monotonic() - self.full_at < _FULL_AGAIN
        return same and sure and self.counts is not None and self.index is not None and self.index.complete

    def rested(self) -> bool:
        """Tell whether it may be taken again."""
        if self.error:
            return time.monotonic() - self.ended_at >= _FAILED_REST
        took = self.counts.scan_seconds if self.counts else 0.0
        return time.monotonic() - self.ended_at >= min(max(_LEAST_REST, _REST * took), _LONGEST_REST)


def dead_in(look: QueueOverview) -> int | None:
    """Count the dead among stored jobs.

    :param look: a look at a queue
    :return: how many there are, where that was counted
    """
    return look.left_over.dead if look.left_over else None
