"""Acknowledgements of NATS ADR-15: ack and term until they are confirmed, and nak with the delay of the next delivery.

The ack wait of a delivery is its step of the backoff, where the consumer has a backoff. A job that is nak'ed with a
delay comes back after that delay plus the backoff of this delivery minus the first backoff; the delay may be negative
to compensate. Where the consumer has no backoff, the worker has one of its own: a nak without a delay would use up all
deliveries of a job within milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from airflow_provider_jetstream.jetstream.client.streams import get_message
from airflow_provider_jetstream.jetstream.client.wire import encode_message
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    PermissionDeniedError,
    TransientError,
    UnreachableError,
)
from airflow_provider_jetstream.jetstream.units import NANOSECONDS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.worker.delivery import PulledMessage


log = logging.getLogger("jetstream.worker")

# Short: an acknowledgement that is sent while the connection breaks is lost, and the ack wait passes meanwhile.
ANSWER_TIMEOUT = 2.0
PAUSE_AFTER_FAILURE = 0.5
_CONFIRM_TIMEOUT = 30.0
_DEFAULT_ACK_WAIT = 30 * NANOSECONDS
_JITTER = 0.2
# The worker's own backoff doubles from the first of these to the last.
_SPACING = (NANOSECONDS, 30 * NANOSECONDS)
# Far below what the server's times can hold, in nanoseconds since 1970.
_LONGEST_DELAY = 100 * 365 * 86_400


async def send_until_confirmed(send: Callable[[], Awaitable[object]], what: str) -> None:
    """Repeat a request until the server has answered; only for requests that may arrive twice.

    :param send: sends the request and waits for the answer
    :param what: names the request in the log
    """
    deadline = time.monotonic() + _CONFIRM_TIMEOUT
    while True:
        try:
            await send()
        except (ApiError, TransientError) as error:
            if time.monotonic() > deadline:
                raise
            log.warning("%s isn't confirmed yet, sending it again: %s", what, error)
            await asyncio.sleep(PAUSE_AFTER_FAILURE)
        else:
            return


async def is_still_stored(connection: Connection, message: PulledMessage) -> bool:
    """Return whether a pulled message is still stored; if not, its sequence may be another job's.

    The server applies what arrives on an acknowledgement subject to the job that has the sequence now. After a loss of
    power that may be a later job, which would be lost, or run twice.
    """
    try:
        stored = await get_message(connection, message.stream, message.sequence)
    except PermissionDeniedError:
        # An older user of the worker may not read it.
        return True
    return stored is not None and message.is_same_as(stored)


async def end_delivery(
    connection: Connection, message: PulledMessage, payload: bytes, what: str, *, reconnects: int | None
) -> None:
    """Acknowledge or terminate a message until that is confirmed, or the message isn't stored any more.

    :param what: names the request in the log
    :param reconnects: how often the connection had reconnected when the message was delivered; ``None`` where the
        request may have been sent before
    """

    async def send() -> None:
        nonlocal reconnects
        await connection.wait_until_connected(ANSWER_TIMEOUT)
        if connection.reconnects != reconnects and not await is_still_stored(connection, message):
            log.info("%s isn't needed: the job is no longer stored", what)
            return
        reconnects = None
        await connection.request(message.reply, payload, time_limit=ANSWER_TIMEOUT)

    await send_until_confirmed(send, what)


def acknowledge_markers(connection: Connection, messages: Sequence[PulledMessage]) -> Sequence[PulledMessage]:
    """Acknowledge the markers of expired jobs among deliveries, without confirmation, and return the jobs."""
    for message in messages:
        if message.is_marker:
            log.info(
                "message %d on %s is a marker of an expired job, and is acknowledged", message.sequence, message.subject
            )
            # A marker that isn't acknowledged is delivered again.
            with suppress(UnreachableError):
                connection.write(encode_message(message.ack_subject, b"+ACK"))
    return [message for message in messages if not message.is_marker]


async def nak(connection: Connection, message: PulledMessage, delay: int | None = None) -> bool:
    """Nak a message, and return whether the server has confirmed it; if not, it comes back after its ack wait.

    An unconfirmed nak isn't repeated, since the repetition may arrive during the next delivery.

    :param delay: nanoseconds, see :mod:`.redelivery`; ``None`` for at once
    """
    if not connection.is_connected:
        return False
    payload = b"-NAK" if delay is None else b"-NAK " + json.dumps({"delay": delay}).encode()
    try:
        await connection.request(message.reply, payload, time_limit=ANSWER_TIMEOUT)
    except TransientError as error:
        log.warning("the nak of job %d isn't confirmed: %s", message.sequence, error)
        return False
    return True


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

    def wait_seconds(self, delay: int | None, attempt: int) -> float:
        """Return after how long the server delivers a job again that is nak'ed with a delay."""
        if delay is None:
            return 0.0
        added = self._step(attempt) - self.backoff[0] if self.backoff else 0
        return max(0, delay + added) / NANOSECONDS

    def _spacing(self, attempt: int) -> int:
        shortest, longest = _SPACING
        doubled = shortest << min(attempt - 1, longest.bit_length())
        return min(doubled, longest, self.ack_wait)

    def _step(self, attempt: int) -> int:
        return self.backoff[min(attempt, len(self.backoff)) - 1] if self.backoff else self.ack_wait
