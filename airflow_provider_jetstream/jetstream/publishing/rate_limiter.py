"""Limits the rate at which jobs are published and letters redriven."""

from __future__ import annotations

import asyncio
import time

_BURST_SECONDS = 0.06


class RateLimiter:
    """Limits messages to a rate: in any period never more than the rate allows, plus one small burst.

    Protocol: the generic cell rate algorithm (ITU-T I.371) with the burst as its tolerance. A batch is half a burst, so
    that the other half can make up for a slow answer.

    :param rate: messages per second; ``None`` for no limit
    """

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._due = 0.0
        self.burst = max(2, int((rate or 0) * _BURST_SECONDS))

    def batch_size(self, maximum: int) -> int:
        """Return how many messages to handle at once.

        :param maximum: the largest batch
        """
        return maximum if self._rate is None else max(1, min(maximum, self.burst // 2))

    async def wait(self, count: int) -> None:
        """Wait until so many more messages are allowed."""
        if (seconds := self.delay(count)) > 0:
            await asyncio.sleep(seconds)

    def delay(self, count: int) -> float:
        """Return the seconds until so many more messages are allowed; 0 or less where they are allowed now."""
        if self._rate is None:
            return 0.0
        return self._due - (self.burst - count) / self._rate - time.monotonic()

    def consume(self, count: int) -> None:
        """Count messages that are handled now."""
        if self._rate is not None:
            self._due = max(self._due, time.monotonic()) + count / self._rate
