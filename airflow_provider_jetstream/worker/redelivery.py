"""How the server treats the deliveries of one consumer, and which delay brings a job back when.

The server waits for a word as long as the backoff of this delivery says. A job that is handed back with a delay comes
back after that delay plus this delivery's backoff less the first one; a delay may be negative to take that off again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from airflow_provider_jetstream.jetstream.units import NANOSECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping

_SERVERS_ACK_WAIT = 30 * NANOSECONDS
_JITTER = 0.2

_dice = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class RedeliveryPolicy:
    """What a consumer on the server says about deliveries.

    :param ack_wait: nanoseconds
    :param backoff: nanoseconds; the last one counts for all later deliveries
    :param max_deliver: deliveries of a job; below 1 for any number
    """

    ack_wait: int
    backoff: tuple[int, ...]
    max_deliver: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read them.

        :param config: the consumer's configuration as the server gives it
        :return: the rules
        """
        return cls(
            ack_wait=config.get("ack_wait") or _SERVERS_ACK_WAIT,
            backoff=tuple(config.get("backoff") or ()),
            max_deliver=config.get("max_deliver", -1),
        )

    def ack_wait_limit(self, attempt: int) -> float:
        """Tell how long the server waits for a word about a delivery.

        :param attempt: 1 for the first delivery
        :return: seconds
        """
        return self._step(attempt) / NANOSECONDS

    def is_last(self, attempt: int) -> bool:
        """Tell whether the server won't deliver the job again.

        :param attempt: 1 for the first delivery
        :return: whether handing it back makes it a dead letter
        """
        return 0 < self.max_deliver <= attempt

    def after_backoff(self, attempt: int) -> int | None:
        """Give the delay with which a job that failed comes back after this delivery's backoff.

        A share of up to a fifth is added by chance, so that jobs that failed together don't come back together. Nothing
        is taken off: whoever declared a backoff is owed it.

        :param attempt: 1 for the first delivery
        :return: nanoseconds to send; ``None`` for at once, which is without backoff, and on the last delivery, since a
            death shall not wait
        """
        if not self.backoff or self.is_last(attempt):
            return None
        return self.backoff[0] + round(self._step(attempt) * _dice.uniform(0, _JITTER))

    def after(self, seconds: float, attempt: int) -> int | None:
        """Give the delay with which a job comes back after just this time.

        :param seconds: the time
        :param attempt: 1 for the first delivery
        :return: nanoseconds to send; ``None`` for at once
        """
        if not seconds or self.is_last(attempt):
            return None
        delay = round(seconds * NANOSECONDS)
        if self.backoff:
            delay += self.backoff[0] - self._step(attempt)
        # The server takes 0 for no delay at all.
        return delay or 1

    def _step(self, attempt: int) -> int:
        return self.backoff[min(attempt, len(self.backoff)) - 1] if self.backoff else self.ack_wait
