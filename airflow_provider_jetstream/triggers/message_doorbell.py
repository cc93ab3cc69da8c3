"""The doorbell: a small event whenever messages wait on a consumer, and again while they do.

Airflow may create one DAG run for several events, and may keep an event without a run until the next one comes. No
message depends on that: an event carries none, the run that it starts pulls whatever waits by then, and while messages
wait another event follows.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, TransientError
from airflow_provider_jetstream.jetstream.inspection.waiting_messages import wait_for_messages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import TypeAlias

    from airflow_provider_jetstream.jetstream.inspection.waiting_messages import WaitingMessages

    # A trigger's is Airflow's own kind.
    TriggerLog: TypeAlias = Any

LONGEST_INTERVAL = 300.0

# Seconds: how long one look for the first message takes, and the pauses after a failure, doubled from first to last.
_LOOK = 60.0
_PAUSES = (1.0, 30.0)
_REPEAT_PROBLEM = 600.0
_JITTER = 0.2

_random = random.SystemRandom()


async def ring(
    nats_conn_id: str, stream: str, consumer: str, interval: float, log: TriggerLog
) -> AsyncIterator[dict[str, Any]]:
    """Yield what waits on a consumer: at once where messages wait, and again while they do.

    Where the server is away, the consumer is gone or a permission is missing, that is logged once, and again every ten
    minutes, and the bell goes on when the problem is gone. A trigger that raised would be started anew by Airflow
    every two seconds.

    :param interval: seconds from one ring to the next at least; they double while the messages of the last event wait
    """
    problems = _Problems(f"{stream}/{consumer}", log)
    rings = _Rings(interval)
    while True:
        try:
            async with JetStreamHook(nats_conn_id).shared() as connection:
                while True:
                    found = await wait_for_messages(connection, stream, consumer)
                    if found is None:
                        rings.rest()
                        found = await wait_for_messages(connection, stream, consumer, _LOOK)
                    problems.clear()
                    if found is None:
                        continue
                    rings.note_waiting(found)
                    if (left := rings.seconds_left()) > 0:
                        await asyncio.sleep(min(left, interval))
                        continue
                    yield found.as_json()
                    rings.note_event(found)
        except Exception as error:  # noqa: BLE001 - such as that of a connection id which Airflow doesn't know
            await asyncio.sleep(problems.note(error))


class _Rings:
    """When the next event may follow."""

    def __init__(self, interval: float) -> None:
        self._shortest = self._interval = interval
        self._rung_at = self._next_at = -LONGEST_INTERVAL
        self._deliveries = self._taken_at = 0

    def rest(self) -> None:
        """Note that none of the messages of the last event waits any more."""
        self._interval = self._shortest
        self._next_at = self._rung_at + self._shortest

    def note_waiting(self, found: WaitingMessages) -> None:
        """Note what waits now: other messages than at the last event, once as many were delivered since."""
        if not self._deliveries <= found.deliveries < self._taken_at:
            self.rest()

    def seconds_left(self) -> float:
        return self._next_at - time.monotonic()

    def note_event(self, found: WaitingMessages) -> None:
        """Note an event."""
        self._deliveries, self._taken_at = found.deliveries, found.deliveries + found.waiting
        self._rung_at = time.monotonic()
        self._next_at = self._rung_at + self._interval
        self._interval = max(self._shortest, min(2 * self._interval, LONGEST_INTERVAL))


class _Problems:
    """Logs what keeps the bell from ringing, and says how long to pause."""

    def __init__(self, where: str, log: TriggerLog) -> None:
        self._where = where
        self._log = log
        self._pause = _PAUSES[0]
        self._kind = ""
        self._logged_at = 0.0

    def note(self, error: Exception) -> float:
        """Note a failure, and return the seconds after which to try again."""
        now = time.monotonic()
        # A server that is away is first silent and then unreachable.
        code = error.code if isinstance(error, JetStreamProviderError) else type(error).__name__
        kind = "transient" if isinstance(error, TransientError) else code
        if kind != self._kind or now - self._logged_at >= _REPEAT_PROBLEM:
            self._kind, self._logged_at = kind, now
            self._log.warning("Messages of %s can't be seen, trying again: %s %s", self._where, code, error)
        pause, self._pause = self._pause, min(2 * self._pause, _PAUSES[1])
        return pause * (1 + _JITTER * _random.random())

    def clear(self) -> None:
        """Note that the consumer could be looked at."""
        if self._kind:
            self._log.info("Messages of %s can be seen again", self._where)
        self._kind, self._pause = "", _PAUSES[0]
