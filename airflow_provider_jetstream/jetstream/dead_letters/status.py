"""What a job is that has entries in the dead letter queue and is no dead letter."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.dead_letters.death import Death
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter


class Status(StrEnum):
    """Why a job with entries in the dead letter queue is no dead letter."""

    COMPLETED = "completed"
    """Its completion is stored."""
    HANDLED = "handled"
    """A consumer of the dead letter queue acknowledged its entry, or reported that it is handled."""
    REDRIVEN = "redriven"
    """The audit states that it was redriven, requeued or parked since."""
    DISCARDED = "discarded"
    """The audit states that it was discarded."""
    ALIVE = "alive"
    """The consumer is about to deliver it again, or a worker has it."""
    UNCERTAIN = "uncertain"
    """Jobs are in flight, and its entry states a death that the server may have forgotten in a restart, or that the
    consumer's numbers contradict."""
    STALE = "stale"
    """Stream, consumer or message is younger than the entry, which is about another job."""
    GONE = "gone"
    """Neither the job nor a copy is stored: finished late, redriven before, or deleted."""
    UNACCOUNTED = "unaccounted"
    """A copy is stored and the job isn't: finished late by a slow worker, or lost by the server."""
    LOST = "lost"
    """Terminated, or perhaps expired while a worker had it, and no copy is stored."""
    SPURIOUS = "spurious"
    """Reported as deleted in flight though it had not expired: the server does so in error after a crash."""

    @property
    def meaning(self) -> str:
        """A clause for people."""
        return _MEANINGS[self]


_MEANINGS = {
    Status.COMPLETED: "its completion is stored",
    Status.HANDLED: "a handler of the dead letter queue has acknowledged its entry, or reported it as handled",
    Status.REDRIVEN: "it was redriven, requeued or parked since",
    Status.DISCARDED: "it was discarded; undo that to bring it back",
    Status.ALIVE: "its consumer is about to deliver it again, or a worker has it",
    Status.UNCERTAIN: "it was dead before the server last restarted or changed, which may have undone that, or its"
    " consumer's numbers contradict that, and while other jobs are in flight it can't be known; redrive it once nothing"
    " is in flight, or count under a pause",
    Status.STALE: "its entry is about an earlier stream, consumer or message of the same name and number",
    Status.GONE: "its job is no longer stored (finished late, redriven before, or deleted)",
    Status.UNACCOUNTED: "its job is no longer stored, though a copy is stored (finished late by a slow worker, or lost"
    " by the server); select unaccounted to bring it back all the same",
    Status.LOST: "it was terminated, or its time was over while a worker had it, and no copy of it is stored",
    Status.SPURIOUS: "it was reported as deleted in flight, but had not expired",
}

# Nothing remains to be done about jobs of these, so that their entries can be removed.
ENDED = frozenset({Status.COMPLETED, Status.HANDLED, Status.REDRIVEN, Status.DISCARDED, Status.GONE, Status.SPURIOUS})


@dataclass(frozen=True, slots=True)
class NotDead:
    """A job that has entries in the dead letter queue and is no dead letter.

    :param sequence: its stream sequence
    :param status: what it is
    :param entries: the sequences of its entries
    :param consumer: the consumer that delivered it
    :param stored: whether it is still stored in the work queue
    :param reported: whether a handler itself reported that it is handled
    :param ended_late: whether it ended after the server had reported that its deliveries were used up
    :param why: the risk that says why it is uncertain, where one does
    :param handled: the handled letter; the audit may have no record of it yet
    :param death: how it died, where it is lost
    """

    sequence: int
    status: Status
    entries: tuple[int, ...]
    consumer: str | None
    stored: bool = False
    reported: bool = False
    ended_late: bool = False
    why: str = ""
    handled: DeadLetter | None = None
    death: Death | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a scan's results, in the order of the jobs.

    :param letters: dead letters that were selected
    :param dismissed: jobs that have entries and are no dead letters
    """

    letters: tuple[DeadLetter, ...]
    dismissed: tuple[NotDead, ...]
