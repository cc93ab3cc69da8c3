"""A delivery that a worker has begun and not settled yet, with the times at which something is due for it."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    import asyncio

    from airflow_provider_jetstream.worker.delivery import Delivery
    from airflow_provider_jetstream.worker.pulled_message import PulledMessage
    from airflow_provider_jetstream.worker.runners import HandlerRun

_SIGNALS_PER_ACK_WAIT: Final = 3


class RunOwner(Protocol):
    """Knows what to do with a run."""

    def on_due(self, run: JobRun, now: float) -> None:
        """Do what is due for a run."""

    def supervise(self, run: JobRun) -> None:
        """Look whether a run's handler has to be ended."""


class JobBatch(Protocol):
    """A call of a handler of several jobs."""

    def supervise(self) -> None:
        """Look whether the call has to be ended."""


class JobRun:
    """A job from its arrival until it is settled; all times are the event loop's.

    :ivar holds_slot: whether no other job can be started for it
    :ivar seconds: its time limit; ``None`` for none
    :ivar attempt: its handler, where that was started without a task that watches over it
    :ivar call: the call of a batch handler that it is part of, while that runs
    :ivar task: what does the rest, where more than the next answer of the server is awaited
    :ivar payload: its encoded completion; empty until that is sent, where it has no result
    :ivar is_stored: whether the completion is
    :ivar reconnects: how often the connection was lost before the delivery
    :ivar request: the number of its unconfirmed request
    :ivar due: the earliest of the times below
    :ivar signal_at: when the server is told next that the job is in progress
    :ivar deadline_at: when its handler has to be done
    :ivar answer_at: when its unconfirmed request is sent again
    """

    __slots__ = (
        "_owner",
        "answer_at",
        "attempt",
        "began",
        "call",
        "deadline_at",
        "due",
        "holds_slot",
        "interval",
        "is_stored",
        "job",
        "message",
        "payload",
        "reconnects",
        "request",
        "seconds",
        "signal_at",
        "task",
    )

    def __init__(
        self, owner: RunOwner, message: PulledMessage, job: Delivery, ack_wait: float, seconds: float | None, now: float
    ) -> None:
        self._owner = owner
        self.message = message
        self.job = job
        self.began = now
        self.interval = ack_wait / _SIGNALS_PER_ACK_WAIT
        self.seconds = seconds
        self.holds_slot = False
        self.attempt: HandlerRun | None = None
        self.call: JobBatch | None = None
        self.task: asyncio.Task[None] | None = None
        self.payload = b""
        self.is_stored = False
        self.reconnects = 0
        self.request = 0
        self.signal_at = now + self.interval
        self.deadline_at = self.answer_at = inf
        self.due = self.signal_at

    def stop_signals(self) -> None:
        """Send no more signals; called before a nak, since a signal after it would delay the next delivery."""
        self.signal_at = inf

    def on_due(self, now: float) -> None:
        """Do what is due, and set the next time."""
        self._owner.on_due(self, now)
        self.due = min(self.signal_at, self.deadline_at, self.answer_at)

    def supervise(self) -> None:
        """Look whether the handler has to be ended."""
        self._owner.supervise(self)
