"""Telling the server that a job is still being worked on, so that it isn't delivered to somebody else meanwhile."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.client.connection import Connection

log = logging.getLogger("jetstream.worker")

_PER_PATIENCE = 3


class Heartbeat:
    """Signals that one delivery is in progress, from now until it is stopped.

    :param connection: the server
    :param message: the job
    :param patience: seconds that the server waits for a word about this delivery; a third of it passes between signals
    """

    def __init__(self, connection: Connection, message: Msg, patience: float) -> None:
        self._client = connection.client
        self._message = message
        self._every = patience / _PER_PATIENCE
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._every, self._tick)
        self._sending: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Signal no more.

        To be called before the job is handed back: a signal after that would put its next delivery off.
        """
        self._timer.cancel()
        if self._sending:
            self._sending.cancel()

    def _tick(self) -> None:
        # What is sent while the connection is away would arrive late, when the job may be somebody else's.
        if self._client.is_connected:
            self._sending = self._loop.create_task(self._signal())
        self._timer = self._loop.call_later(self._every, self._tick)

    async def _signal(self) -> None:
        from nats import errors

        try:
            await self._message.in_progress()
        except errors.Error as error:
            log.debug("A signal that job %s is in progress was not sent: %s", self._message.reply, error)
