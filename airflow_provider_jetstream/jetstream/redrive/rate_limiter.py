"""Keeping a redrive to a rate."""

from __future__ import annotations

import asyncio
import time

_BURST_SECONDS = 0.06


class RateLimiter:
    """Lets letters through at a rate: never more in any time than the rate allows, and one small burst.

    Protocol: the generic cell rate algorithm (ITU-T I.371) with the burst as its tolerance. Letters go by half a burst,
    so that there is room to catch up with what a slow answer delayed.

    :param rate: letters a second; ``None`` for all speed
    """

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._due = 0.0
        self.burst = max(2, int((rate or 0) * _BURST_SECONDS))

    def batch_size(self, most: int) -> int:
        """Tell how many letters may go together.

        :param most: how many there can be at most
        :return: how many
        """
        return most if self._rate is None else max(1, min(most, self.burst // 2))

    async def wait(self, letters: int) -> None:
        """Wait until so many more letters may go.

        :param letters: how many go next
        """
        if (early := self.delay(letters)) > 0:
            await asyncio.sleep(early)

    def delay(self, letters: int) -> float:
        """Tell how long so many more letters have to wait.

        :param letters: how many go next
        :return: seconds; not above 0 where they may go
        """
        if self._rate is None:
            return 0.0
        return self._due - (self.burst - letters) / self._rate - time.monotonic()

    def consume(self, letters: int) -> None:
        """Take note that letters go now.

        :param letters: how many
        """
        if self._rate is not None:
            self._due = max(self._due, time.monotonic()) + letters / self._rate
