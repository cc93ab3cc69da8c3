"""Acknowledgements of NATS ADR-15: in progress and nak, and the repetition of ack and term until they are confirmed."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.errors import ApiError, TransientError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.client.connection import Connection

log = logging.getLogger("jetstream.worker")

# Short: an acknowledgement that is sent while the connection breaks is lost, and the ack wait passes meanwhile.
ANSWER_TIMEOUT = 2.0
PAUSE_AFTER_FAILURE = 0.5
_CONFIRM_TIMEOUT = 30.0
_SIGNALS_PER_ACK_WAIT = 3


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


async def nak(connection: Connection, message: Msg, delay: int | None = None) -> bool:
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
        log.warning("the nak of job %d isn't confirmed: %s", message.metadata.sequence.stream, error)
        return False
    return True


class Heartbeat:
    """Tells the server that a delivery is in progress, three times per ack wait (in seconds), until it is stopped."""

    def __init__(self, connection: Connection, message: Msg, ack_wait: float) -> None:
        self._connection = connection
        self._message = message
        self._interval = ack_wait / _SIGNALS_PER_ACK_WAIT
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._interval, self._tick)
        self._sending: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Send no more signals; called before a nak, since a signal after it would delay the next delivery."""
        self._timer.cancel()
        if self._sending:
            self._sending.cancel()

    def _tick(self) -> None:
        # A signal sent while the connection is lost would arrive late, when another worker may have the job.
        if self._connection.is_connected:
            self._sending = self._loop.create_task(self._signal())
        self._timer = self._loop.call_later(self._interval, self._tick)

    async def _signal(self) -> None:
        try:
            await self._connection.publish(self._message.reply, b"+WPI")
        except TransientError as error:
            log.debug("the in-progress signal for %s was not sent: %s", self._message.reply, error)
