"""When the server delivers a job again, by the ack wait, backoff and max deliver of its consumer.

The ack wait of a delivery is its step of the backoff, where the consumer has a backoff. A job that is nak'ed with a
delay comes back after that delay plus the backoff of this delivery minus the first backoff; the delay may be negative
to compensate. Where the consumer has no backoff, the worker has one of its own: a nak without a delay would use up all
deliveries of a job within milliseconds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from airflow_provider_jetstream.jetstream.units import NANOSECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping

_DEFAULT_ACK_WAIT = 30 * NANOSECONDS
_JITTER = 0.2
# The worker's own backoff doubles from the first of these to the last.
_SPACING = (NANOSECONDS, 30 * NANOSECONDS)
# Far below what the server's times can hold, in nanoseconds since 1970.
_LONGEST_DELAY = 100 * 365 * 86_400

_random = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class RedeliveryPolicy:
    """A consumer's settings for deliveries, in nanoseconds.

    The last step of the backoff counts for all later deliveries; a ``max_deliver`` below 1 sets no limit.
    """

    ack_wait: int
    backoff: tuple[int, ...]
    max_deliver: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read the policy from the configuration in the server's CONSUMER.INFO."""
        return cls(
            ack_wait=config.get("ack_wait") or _DEFAULT_ACK_WAIT,
            backoff=tuple(config.get("backoff") or ()),
            max_deliver=config.get("max_deliver", -1),
        )

    def ack_wait_seconds(self, attempt: int) -> float:
        """Return how long the server waits for an acknowledgement of this delivery; the first attempt is 1."""
        return (self._step(attempt) if self.backoff else self.ack_wait) / NANOSECONDS

    def is_last(self, attempt: int) -> bool:
        """Return whether the server won't deliver the job again, so that a nak makes it a dead letter."""
        return 0 < self.max_deliver <= attempt

    def backoff_delay(self, attempt: int) -> int | None:
        """Return the nak delay, in nanoseconds, with which a failed job comes back after this delivery's backoff.

        Up to a fifth is added at random, so that jobs that failed together don't come back together. Nothing is
        subtracted: the declared backoff is a minimum. Without a backoff it is 1 s after the first delivery, twice as
        long after each further one, and never longer than 30 s or the ack wait: a failure isn't retried later than a
        crash. ``None`` (no delay) on the last delivery, since the advisory of a dead letter must not wait.
        """
        if self.is_last(attempt):
            return None
        jitter = _random.uniform(0, _JITTER)
        if self.backoff:
            return self.backoff[0] + round(self._step(attempt) * jitter)
        return round(self._spacing(attempt) * (1 + jitter))

    def nak_delay(self, seconds: float, attempt: int) -> int | None:
        """Return the nak delay, in nanoseconds, with which a job comes back after just this time; ``None``: at once."""
        if not seconds or self.is_last(attempt):
            return None
        delay = round(min(seconds, _LONGEST_DELAY) * NANOSECONDS)
        if self.backoff:
            delay += self.backoff[0] - self._step(attempt)
        # The server takes 0 for no delay at all.
        return delay or 1

    def _spacing(self, attempt: int) -> int:
        shortest, longest = _SPACING
        doubled = shortest << min(attempt - 1, longest.bit_length())
        return min(doubled, longest, self.ack_wait)

    def _step(self, attempt: int) -> int:
        return self.backoff[min(attempt, len(self.backoff)) - 1] if self.backoff else self.ack_wait
