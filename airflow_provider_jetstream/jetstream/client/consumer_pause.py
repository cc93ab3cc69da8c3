"""Pauses a consumer for a few seconds at a time: if this process is killed, the consumer resumes by itself.

Protocol: the NATS documentation, "JetStream wire API reference", CONSUMER.PAUSE; needs server 2.11. The server compares
the end of the pause with its own clock, so it is calculated from the server's time.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.server_clock import ServerClock
from airflow_provider_jetstream.jetstream.client.stream_api import consumer_info
from airflow_provider_jetstream.jetstream.errors import ApiError, NotFoundError, TransientError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from airflow_provider_jetstream.jetstream.client.connection import Connection

log = logging.getLogger(__name__)

# The level of JetStream's API that knows pauses.
PAUSE_LEVEL = 1

_PAUSE = timedelta(seconds=10)
_RENEWAL_SECONDS = 3.0


class ConsumerPause:
    """A pause of a consumer that lasts as long as a block runs.

    :param before: until when somebody else has paused the consumer, if so; it is never paused for less
    :ivar left_alone: whether the pause isn't ended with the block, but runs out by itself
    """

    def __init__(
        self, connection: Connection, stream: str, consumer: str, clock: ServerClock, before: str | None
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._consumer = consumer
        self._clock = clock
        self._before = before
        self._renewal: asyncio.Task[None] | None = None
        self._requesting = asyncio.Lock()
        self._unanswered: TransientError | None = None
        self._until: str | None = None
        self.left_alone = False

    async def begin(self) -> None:
        """Pause the consumer for a few seconds, again and again."""
        await self._pause_for(_PAUSE)
        self._renewal = asyncio.create_task(self._renew())

    async def prolong(self, seconds: float) -> None:
        """Pause the consumer for some seconds from now on: what reaches the server meanwhile finds it paused.

        :raises ApiError: the server refused
        :raises TransientError: it isn't known to be paused for so long
        """
        await self._stop_renewal()
        if self._unanswered:
            # Should it arrive now, it ends the pause early.
            raise UnreachableError(f"an earlier request to pause the consumer wasn't answered: {self._unanswered}")
        await self._pause_for(timedelta(seconds=seconds))

    async def end(self) -> None:
        """End the pause, but for one that somebody else has set, before or meanwhile."""
        await self._stop_renewal()
        if not self.left_alone:
            with suppress(ApiError, NotFoundError, TransientError):
                info = await consumer_info(self._connection, self._stream, self._consumer)
                found = info["config"].get("pause_until")
                # A reset in place counts on its pause.
                if found and self._until and datetime.fromisoformat(found) == datetime.fromisoformat(self._until):
                    await self._set(self._before)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_RENEWAL_SECONDS)
            async with self._requesting:
                try:
                    await self._pause_for(_PAUSE)
                except TransientError as error:
                    self._unanswered = error
                except ApiError as error:
                    log.warning("The pause of consumer %s can't be renewed: %s", self._consumer, error)

    async def _stop_renewal(self) -> None:
        async with self._requesting:
            if self._renewal is not None:
                self._renewal.cancel()
                self._renewal = None

    async def _pause_for(self, duration: timedelta) -> None:
        until = self._clock.now() + duration
        if self._before and datetime.fromisoformat(self._before) > until:
            await self._set(self._before)
            return
        await self._set(until.astimezone(UTC).isoformat().replace("+00:00", "Z"))

    async def _set(self, until: str | None) -> None:
        self._until = until
        request = {"pause_until": until} if until else {}
        await self._connection.api(f"CONSUMER.PAUSE.{self._stream}.{self._consumer}", request)


@asynccontextmanager
async def paused(connection: Connection, stream: str, consumer: str) -> AsyncIterator[ConsumerPause]:
    """Pause a consumer for the block, and restore a longer pause that was set before.

    Deliveries in flight go on and can be acknowledged. A pause that can't be renewed runs out: before a step that
    depends on it, read CONSUMER.INFO's ``paused`` and ``pause_remaining``.

    :raises NotFoundError: the stream or the consumer doesn't exist
    :raises ApiError: the server refused
    """
    info = await consumer_info(connection, stream, consumer)
    before, clock = info["config"].get("pause_until"), ServerClock.of(info)
    if before and datetime.fromisoformat(before) <= clock.answered_at + _PAUSE:
        # That of a process that was killed, or as good as over.
        before = None
    pause = ConsumerPause(connection, stream, consumer, clock, before)
    await pause.begin()
    try:
        yield pause
    finally:
        await pause.end()
