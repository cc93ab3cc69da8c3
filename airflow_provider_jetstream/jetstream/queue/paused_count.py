"""A count under a pause: consumers are paused until nothing is in flight, so that numbers prove which jobs are dead.

While deliveries are open, which of a consumer's delivered jobs are dead is known from entries only. On a queue that is
never idle that moment never comes by itself. During a pause workers keep the jobs that they have, can acknowledge them,
and get no others; a pause ends by itself where this process is killed. What one moment without open deliveries proves
stays proved when deliveries go on.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently, sleep
from airflow_provider_jetstream.jetstream.client.stream_api import PAUSE_LEVEL, list_consumers, paused
from airflow_provider_jetstream.jetstream.errors import NotFoundError, ServerTooOldError
from airflow_provider_jetstream.jetstream.queue.consumer_state import Settlement, consumer_state

if TYPE_CHECKING:
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.stream_api import ListedConsumers

# A consumer is paused for at most its ack wait, and never for longer than this.
LONGEST_PAUSE = 30.0
_POLL_PAUSE = 0.05


@dataclass(slots=True)
class PausedCount:
    """The result of a count under a pause.

    :param settlements: by consumer, what the count proved
    :param created: by consumer when that was created
    :param incomplete: consumers that had deliveries open at the end of their pause, with their number
    """

    settlements: dict[str, Settlement] = field(default_factory=dict)
    created: dict[str, datetime] = field(default_factory=dict)
    incomplete: dict[str, int] = field(default_factory=dict)


async def take_paused_count(connection: Connection, queue: str, consumers: ListedConsumers) -> PausedCount:
    """Pause the consumers that have open deliveries until they have none, and return what that proves.

    :param consumers: the consumers, read just now
    :raises ServerTooOldError: the server can't pause consumers
    :raises ApiError: the server refused to
    """
    if connection.api_level < PAUSE_LEVEL:
        version = ".".join(map(str, connection.server_version))
        raise ServerTooOldError(
            f"a count under a pause of {queue}: expected nats-server 2.11 or later, which can pause consumers,"
            f" found {version}: upgrade it, or leave count_under_pause out; nothing was changed"
        )
    return await _Pauses(connection, queue, consumers).settle()


class _Pauses:
    """The consumers that a count has yet to settle, each paused unless somebody else has paused it."""

    def __init__(self, connection: Connection, queue: str, consumers: ListedConsumers) -> None:
        self._connection = connection
        self._queue = queue
        self._consumers = consumers
        self._count = PausedCount()
        # By consumer when its pause began, or somebody else's was found.
        self._since: dict[str, float] = {}
        self._pauses: dict[str, AsyncExitStack] = {}

    async def settle(self) -> PausedCount:
        waiting = [name for name in self._consumers if not self._is_settled(name)]
        try:
            while waiting:
                await map_concurrently(self._begin_pause, waiting)
                await sleep(_POLL_PAUSE)
                self._consumers = await list_consumers(self._connection, self._queue)
                ended = [name for name in waiting if self._is_settled(name) or self._is_over(name)]
                await map_concurrently(self._resume, ended)
                waiting = [name for name in waiting if name not in ended]
        finally:
            await map_concurrently(self._resume, list(self._pauses))
        return self._count

    async def _begin_pause(self, name: str) -> None:
        if name in self._pauses or self._consumers[name].get("paused"):
            self._since.setdefault(name, time.monotonic())
            return
        stack = AsyncExitStack()
        # One that is deleted just now isn't listed next time.
        with suppress(NotFoundError):
            await stack.enter_async_context(paused(self._connection, self._queue, name))
            self._pauses[name] = stack
        self._since[name] = time.monotonic()

    async def _resume(self, name: str) -> None:
        if stack := self._pauses.pop(name, None):
            await stack.aclose()

    def _is_settled(self, name: str) -> bool:
        """Note what a consumer's numbers prove where nothing is in flight; return whether it needn't be read again."""
        info = self._consumers.get(name)
        if info is not None and info["num_ack_pending"]:
            return False
        if info is not None:
            state = consumer_state(info, 0, None, self._consumers.held_above)
            self._count.settlements[name] = Settlement(state.settled, state.taken_at)
            self._count.created[name] = state.created
        return True

    def _is_over(self, name: str) -> bool:
        state = consumer_state(self._consumers[name], 0, None, None)
        limit = min(state.max_ack_wait.total_seconds(), LONGEST_PAUSE)
        if time.monotonic() - self._since[name] <= limit:
            return False
        self._count.incomplete[name] = state.in_flight
        return True
