"""Limits the rate at which jobs are published and letters redriven."""

from __future__ import annotations

import asyncio
import time
from math import isfinite

from airflow_provider_jetstream.jetstream.errors import JobError

# Seconds: by how much a message may come early, and by how much the server may store one late, without any effect on
# those after it. The interval is longer than the rate's by what makes up for both in ten seconds.
_EARLY = 0.05
_LATE = 0.13
_STRETCH = 1.02


class RateLimiter:
    """Limits messages to a rate: the server stores no more of them in any ten seconds than the rate allows.

    Nor in any longer period; in a shorter one it stores at most those of 0.18 s more, and one. The average is 2 % below
    the rate. The messages are spread evenly: a few may come early to make up for a slow answer.

    Protocol: the generic cell rate algorithm (ITU-T I.371). What the server stores later than it was sent would come
    too close to those after it, so these are delayed by :meth:`record_stored`.

    :param rate: messages per second; ``None`` for no limit
    """

    def __init__(self, rate: float | None) -> None:
        self._interval = _STRETCH / rate if rate else 0.0
        self._due = 0.0

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit."""
        return self._interval > 0

    def batch_size(self, maximum: int) -> int:
        """Return how many messages to handle at once.

        :param maximum: the largest batch
        """
        # Half of what may come early, so that the other half can make up for a slow answer.
        return max(1, min(maximum, int(_EARLY / self._interval / 2))) if self._interval else maximum

    async def wait(self, count: int) -> None:
        """Wait until the rate allows a number of further messages."""
        if (seconds := self.delay(count)) > 0:
            await asyncio.sleep(seconds)

    def delay(self, count: int) -> float:
        """Return the seconds until the rate allows a number of further messages; 0 or less if it does now."""
        if not self._interval:
            return 0.0
        return self._due + (count - 1) * self._interval - _EARLY - time.monotonic()

    def consume(self, count: int) -> None:
        """Count messages that are handled now."""
        if self._interval:
            self._due = max(self._due, time.monotonic()) + count * self._interval

    def record_stored(self, count: int) -> None:
        """Delay the next messages as far as needed if the server has stored the latest ones only now.

        :param count: how many of the messages so far may have been stored that late
        """
        if self._interval:
            self._due = max(self._due, time.monotonic() + count * self._interval - _LATE)


def check_rate(rate: float | None) -> None:
    """Refuse a rate that isn't above 0.

    :raises JobError: it isn't
    """
    if rate is not None and not (isfinite(rate) and rate > 0):
        raise JobError(f"expected a rate above 0 jobs a second, found {rate}: leave it out for all speed")
