"""Whether an end that is stored is about the message that is stored now; nothing is read here.

Each stream syncs by itself, so after a loss of power a queue's file may be older than the files of its companions. Then
new jobs get the sequences of ended jobs, within one creation of the stream. So an end counts only if the server
stored it after the message. The id of a worker's completion has the time at which the job was stored, which is exact.
For every other end the servers' times decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot

# Servers whose clocks are synchronised differ by milliseconds; this is for one that has just been started again, and
# for a clock that is set. A server takes longer than a second to be back, so that a larger difference does no harm.
CLOCK_SKEW: Final = timedelta(seconds=5)
# Workers of version 1 state the time of a job in seconds, as a floating-point number.
_ID_PRECISION: Final = 1_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


class Order(Enum):
    """When an end was stored, compared with another moment, such as that at which the message was stored."""

    BEFORE = "before"
    AFTER = "after"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """What is known of the clocks that the times of a queue and its companions are of.

    :param clustered: whether they may be of several servers
    :param up_since: since when no server of the queue has been restarted, where that is known: until then no sequence
        was given twice
    """

    clustered: bool = False
    up_since: datetime | None = None

    @classmethod
    def of(cls, snapshot: QueueSnapshot) -> ServerTimes:
        """Return what a snapshot tells."""
        consumers = snapshot.consumers.values()
        times = [consumer.up_since for consumer in consumers]
        known = [time for time in times if time is not None]
        return cls(
            clustered=any(consumer.clustered for consumer in consumers),
            up_since=max(known) if known and len(known) == len(times) else None,
        )

    @property
    def skew(self) -> timedelta:
        """By how much the server's times may differ."""
        return CLOCK_SKEW if self.clustered else timedelta()

    def order(self, end_at: datetime, moment: datetime) -> Order:
        """Return whether an end was stored before a moment or not."""
        if end_at < moment - self.skew:
            return Order.BEFORE
        is_one_clock = not self.clustered and self.up_since is not None and self.up_since <= moment
        return Order.AFTER if is_one_clock or end_at >= moment + CLOCK_SKEW else Order.UNCLEAR

    def bearing(self, end_at: datetime, stored_at: datetime, job_time: int | None = None) -> Order:
        """Return whether an end is about a message (``AFTER``), or about an earlier one of its sequence (``BEFORE``).

        :param end_at: when the end was stored
        :param stored_at: when the message was stored
        :param job_time: when the job of the end was stored, in nanoseconds since 1970, where the end names that
        """
        if job_time is not None:
            difference = job_time - (stored_at - _EPOCH) // _MICROSECOND * 1_000
            return Order.AFTER if abs(difference) < _ID_PRECISION else Order.BEFORE
        order = self.order(end_at, stored_at)
        first = min(end_at, stored_at) - CLOCK_SKEW
        if order is Order.UNCLEAR and self.clustered and self.up_since is not None and self.up_since <= first:
            return Order.AFTER
        return order
