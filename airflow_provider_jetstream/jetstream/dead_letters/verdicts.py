"""What the dead letter queue's word about a job can turn out to be, where the job is no dead letter."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What the dead letter queue's word about a job turned out to be, where it is no dead letter."""

    COMPLETED = "completed"
    """Its completion is stored."""
    REDRIVEN = "redriven"
    """The audit says that it was redriven, requeued or parked since."""
    ALIVE = "alive"
    """The consumer is about to deliver it again, or a worker has it."""
    STALE = "stale"
    """Stream, consumer or message is younger: it was about another job."""
    GONE = "gone"
    """No longer stored, and nothing was kept: finished late, redriven before, or deleted."""
    VANISHED = "vanished"
    """No longer stored, though its body was kept: finished late by a slow worker, or lost by the server."""
    LOST = "lost"
    """Terminated, or perhaps expired in a worker's hands, and nobody kept its body."""
    SPURIOUS = "spurious"
    """Said to be deleted in flight without having expired: the server says so in error after a crash."""

    @property
    def meaning(self) -> str:
        """What to tell a person."""
        return _MEANINGS[self]


_MEANINGS = {
    Verdict.COMPLETED: "its completion is stored",
    Verdict.REDRIVEN: "it was redriven, requeued or parked since",
    Verdict.ALIVE: "its consumer is about to deliver it again, or a worker has it",
    Verdict.STALE: "its entry is about an earlier stream, consumer or message of the same name and number",
    Verdict.GONE: "its job is no longer stored (finished late, redriven before, or deleted)",
    Verdict.VANISHED: "its job is no longer stored, though its body was kept (finished late by a slow worker, or lost"
    " by the server); select vanished to bring it back all the same",
    Verdict.LOST: "it was terminated, or its time was over while a worker had it, and nobody kept its body",
    Verdict.SPURIOUS: "it was said to be deleted in flight, but had not expired",
}

# Nothing more is to be done about jobs of these.
ENDED = frozenset({Verdict.COMPLETED, Verdict.REDRIVEN, Verdict.GONE, Verdict.SPURIOUS})


@dataclass(frozen=True, slots=True)
class Dismissal:
    """A job about which the dead letter queue holds something, though it is no dead letter.

    :param sequence: its stream sequence
    :param verdict: what it is
    :param entries: where the dead letter queue holds something about it
    :param consumer: who delivered it
    :param stored: whether it is still stored in the work queue
    """

    sequence: int
    verdict: Verdict
    entries: tuple[int, ...]
    consumer: str | None
    stored: bool = False
