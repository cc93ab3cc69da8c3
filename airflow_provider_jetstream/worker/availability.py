"""Being told that there is a job without taking it: a pull request that is too small for any.

The server answers such a request the moment a job can be delivered, and puts the job back with its count of deliveries
as before. It says nothing while the consumer is paused or has as many jobs in flight as it may. So a bell may be open
for several consumers at a time, where real requests could bring more jobs than there is room for. Measured with
nats-server 2.15: fifty bells left a job's next real delivery at the number it would have had.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Self

from airflow_provider_jetstream.jetstream.units import NANOSECONDS
from airflow_provider_jetstream.worker.fetcher import (
    NO_MESSAGES,
    PAUSE_AFTER_REFUSAL,
    PULL_EXPIRES,
    read_status,
    unsubscribe,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.worker.consumers import BoundConsumer

log = logging.getLogger("jetstream.worker")

_BELL = {"batch": 1, "max_bytes": 1, "expires": round(PULL_EXPIRES * NANOSECONDS)}
_TOO_LARGE = "Message Size Exceeds MaxBytes"
# Only a lost connection or a dead leader leaves a bell unanswered.
_LOST_AFTER = 1.5 * PULL_EXPIRES
# Enough for a consumer's own idle workers to be faster.
_COURTESY = 0.02


class AvailabilityProbe:
    """Tells whether a lane has jobs; silent lanes are listened to.

    :param connection: the server
    :param lane: the lane
    :param rang: is called when it begins to have jobs
    """

    def __init__(self, connection: Connection, consumer: BoundConsumer, on_available: Callable[[], None]) -> None:
        self._connection = connection
        self._subject = consumer.next_subject
        self._body = json.dumps(_BELL | consumer.request_fields).encode()
        self._courtesy = _COURTESY if consumer.is_fallback else 0.0
        self._rang = on_available
        self._inbox = connection.client.new_inbox()
        self._requests = 0
        self._pause = 0.0
        self._answer: asyncio.Future[Msg] | None = None
        # Until it is looked there, so that the first look goes by urgency rather than by who rings first.
        self._silent = asyncio.Event()

    @property
    def available(self) -> bool:
        """Whether there were jobs when it was heard of last."""
        return not self._silent.is_set()

    def arm(self, pause: float = 0.0) -> None:
        """Take in that there are no more jobs for now, and listen for the next.

        :param pause: seconds until then
        """
        self._pause = pause
        self._silent.set()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[Self]:
        """Listen until the block is left, which no job is lost by.

        :return: the bell
        """
        subscription = await self._connection.client.subscribe(f"{self._inbox}.*", cb=self._answered)
        listening = asyncio.create_task(self._listen())
        try:
            yield self
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            await unsubscribe(subscription)

    async def _listen(self) -> None:
        while True:
            await self._silent.wait()
            await asyncio.sleep(self._pause)
            self._pause = 0.0
            if await self._rings():
                await asyncio.sleep(self._courtesy)
                self._silent.clear()
                self._rang()

    async def _rings(self) -> bool:
        from nats import errors

        if not self._connection.client.is_connected:
            await asyncio.sleep(PAUSE_AFTER_REFUSAL)
            return False
        self._requests += 1
        self._answer = asyncio.get_running_loop().create_future()
        try:
            await self._connection.client.publish(self._subject, self._body, reply=f"{self._inbox}.{self._requests}")
            async with asyncio.timeout(_LOST_AFTER):
                status, description = read_status(await self._answer)
        except TimeoutError:
            return False
        except errors.Error as error:
            status, description = "none", str(error)
        if description == _TOO_LARGE or status in NO_MESSAGES:
            return description == _TOO_LARGE
        log.warning("%s tells of no jobs just now: %s (status %s)", self._subject, description, status)
        await asyncio.sleep(PAUSE_AFTER_REFUSAL)
        return False

    async def _answered(self, answer: Msg) -> None:
        if self._answer and not self._answer.done() and answer.subject == f"{self._inbox}.{self._requests}":
            self._answer.set_result(answer)
