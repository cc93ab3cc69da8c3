"""The last hour of a queue in memory: one point each 20 seconds, and the current rates."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.inspection.queue_state import QueueWatch
from airflow_provider_jetstream.plugins.monitor import clock
from airflow_provider_jetstream.plugins.monitor.models.history import Point

if TYPE_CHECKING:
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.inspection.health import QueueHealth

_STEP_SECONDS = 20
_STEPS = 3600 // _STEP_SECONDS
SPARKLINE_POINTS = 60
# Two polls that are far apart, as after a time without viewers, don't make a current rate.
_LONGEST_INTERVAL = 120.0


@dataclass(slots=True)
class Rates:
    """Rates per second between the last two polls; ``None`` where they aren't known.

    :param stored: messages stored
    :param gone: messages gone
    :param deliveries: deliveries by consumer
    """

    stored: float | None = None
    gone: float | None = None
    deliveries: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class QueueHistory:
    """The history of one queue.

    :param rates: between the last two polls
    :param watch: the states of its parts
    """

    watch: QueueWatch = field(default_factory=QueueWatch)
    rates: Rates = field(default_factory=Rates)
    _points: deque[Point] = field(default_factory=lambda: deque(maxlen=_STEPS))
    _last: QueueHealth | None = None

    def add(self, health: QueueHealth, dead: int | None) -> None:
        """Add the numbers of a poll; the last poll of each step makes its point.

        :param dead: dead letters, if their number is known
        """
        self.rates, self._last = _rates(self._last, health), health
        point = Point(
            at=health.taken_at,
            pending=health.pending,
            in_flight=health.in_flight,
            dead=dead,
            in_per_second=self.rates.stored,
            out_per_second=self.rates.gone,
        )
        if self._points and _step(self._points[-1].at) == _step(point.at):
            self._points.pop()
        self._points.append(point)

    def points(self) -> list[Point]:
        """Return the points of the last hour, oldest first."""
        now = clock.now().timestamp()
        return [point for point in self._points if now - point.at.timestamp() <= _STEPS * _STEP_SECONDS]


def sparkline(points: list[Point]) -> list[int | None]:
    """Return pending jobs, oldest first: at most 60 numbers, the maximum of each interval; ``None`` for a gap."""
    width = -(-len(points) // SPARKLINE_POINTS) or 1
    groups = (points[start : start + width] for start in range(0, len(points), width))
    return [max((point.pending for point in group if point.pending is not None), default=None) for group in groups]


def _step(at: datetime) -> int:
    return int(at.timestamp()) // _STEP_SECONDS


def _rates(before: QueueHealth | None, now: QueueHealth) -> Rates:
    if before is None or before.created != now.created:
        return Rates()
    seconds = (now.taken_at - before.taken_at).total_seconds()
    if not 0 < seconds <= _LONGEST_INTERVAL:
        return Rates()
    stored = now.last_sequence - before.last_sequence
    gone = max(0, stored - (now.stored - before.stored))
    deliveries = {
        name: max(0, consumer.deliveries - before.consumers[name].deliveries) / seconds
        for name, consumer in now.consumers.items()
        if name in before.consumers
    }
    return Rates(stored / seconds, gone / seconds, deliveries)
