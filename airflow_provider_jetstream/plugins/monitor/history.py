"""The last hour of a queue in memory: what was last seen in each third of a minute, and how fast jobs come and go."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from airflow_provider_jetstream.plugins.monitor.models import Point

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.inspection.health import QueueHealth

_STEP_SECONDS = 20
_STEPS = 3600 // _STEP_SECONDS
_SPARKLINE = 60
# Two looks far apart, as after a pause in which nobody looked, don't make a rate of now.
_LONGEST_PAUSE = 120.0


@dataclass(slots=True)
class Rates:
    """How fast jobs came and went between the last two looks.

    :param stored: messages stored a second
    :param gone: messages gone a second
    :param deliveries: deliveries a second by consumer
    """

    stored: float | None = None
    gone: float | None = None
    deliveries: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class QueueHistory:
    """What was seen of one queue.

    :param rates: between the last two looks
    """

    rates: Rates = field(default_factory=Rates)
    _points: deque[Point] = field(default_factory=lambda: deque(maxlen=_STEPS))
    _last: QueueHealth | None = None

    def add(self, health: QueueHealth, dead: int | None) -> None:
        """Note a look.

        :param health: what was seen
        :param dead: dead letters, as far as they are known
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
        """Give the last hour, oldest first.

        :return: a point for each third of a minute in which somebody looked
        """
        now = datetime.now(UTC).timestamp()
        return [point for point in self._points if now - point.at.timestamp() <= _STEPS * _STEP_SECONDS]

    def sparkline(self) -> list[int]:
        """Give the pending jobs of the last hour, oldest first.

        :return: at most sixty numbers, the largest of each stretch
        """
        pending = [point.pending for point in self.points()]
        width = -(-len(pending) // _SPARKLINE) or 1
        return [max(pending[start : start + width]) for start in range(0, len(pending), width)]


def _step(at: datetime) -> int:
    return int(at.timestamp()) // _STEP_SECONDS


def _rates(before: QueueHealth | None, now: QueueHealth) -> Rates:
    if before is None or before.created != now.created:
        return Rates()
    seconds = (now.taken_at - before.taken_at).total_seconds()
    if not 0 < seconds <= _LONGEST_PAUSE:
        return Rates()
    stored = now.last_sequence - before.last_sequence
    gone = max(0, stored - (now.stored - before.stored))
    deliveries = {
        name: max(0, each.deliveries - before.consumers[name].deliveries) / seconds
        for name, each in now.consumers.items()
        if name in before.consumers
    }
    return Rates(stored / seconds, gone / seconds, deliveries)
