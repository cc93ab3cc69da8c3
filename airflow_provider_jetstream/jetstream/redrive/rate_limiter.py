"""Limits the rate of a redrive."""

from __future__ import annotations

import asyncio
import time

_BURST_SECONDS = 0.06


class RateLimiter:
    """Limits letters to a rate: in any period never more than the rate allows, plus one small burst.

    Protocol: the generic cell rate algorithm (ITU-T I.371) with the burst as its tolerance. A batch is half a burst, so
    that the other half can make up for a slow answer.

    :param rate: letters per second; ``None`` for no limit
    """

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._due = 0.0
        self.burst = max(2, int((rate or 0) * _BURST_SECONDS))

    def batch_size(self, maximum: int) -> int:
        """Return how many letters to handle at once.

        :param maximum: the largest batch
        """
        return maximum if self._rate is None else max(1, min(maximum, self.burst // 2))

    async def wait(self, letters: int) -> None:
        """Wait until so many more letters are allowed."""
        if (seconds := self.delay(letters)) > 0:
            await asyncio.sleep(seconds)

    def delay(self, letters: int) -> float:
        """Return the seconds until so many more letters are allowed; 0 or less where they are allowed now."""
        if self._rate is None:
            return 0.0
        return self._due - (self.burst - letters) / self._rate - time.monotonic()

    def consume(self, letters: int) -> None:
        """Count letters that are handled now."""
        if self._rate is not None:
            self._due = max(self._due, time.monotonic()) + letters / self._rate
