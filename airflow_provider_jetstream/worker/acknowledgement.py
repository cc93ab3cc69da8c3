"""Sending what settles a job until the server has confirmed it."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.client.connection import Connection

log = logging.getLogger("jetstream.worker")

# What is sent while the connection breaks is lost; waiting long for its answer would let the ack wait pass.
ANSWER_SECONDS = 2.0
PAUSE_AFTER_FAILURE = 0.5
_SETTLE_SECONDS = 30.0


async def send_until_confirmed(send: Callable[[], Awaitable[object]], what: str) -> None:
    """Send until the server has answered; only for what may arrive twice.

    :param send: sends and waits for the answer
    :param what: what is sent, for the log
    """
    from nats import errors
    from nats.js import errors as js_errors

    given_up = time.monotonic() + _SETTLE_SECONDS
    while True:
        try:
            await send()
        except (errors.Error, js_errors.Error) as error:
            if time.monotonic() > given_up:
                raise
            log.warning("%s isn't confirmed yet, sending it again: %s", what, error)
            await asyncio.sleep(PAUSE_AFTER_FAILURE)
        else:
            return


async def nak(connection: Connection, message: Msg, delay: int | None = None) -> bool:
    """Give a job back for its next delivery; what is in doubt isn't repeated, since it may hit that delivery.

    Protocol: the acknowledgements of NATS ADR-15.

    :param connection: the server
    :param message: the job
    :param delay: nanoseconds, see :mod:`.delivery_rules`; ``None`` for at once
    :return: whether the server has confirmed it; if not, the job comes back when its ack wait is over
    """
    from nats import errors

    if not connection.client.is_connected:
        return False
    told = b"-NAK" if delay is None else b"-NAK " + json.dumps({"delay": delay}).encode()
    try:
        await connection.client.request(message.reply, told, timeout=ANSWER_SECONDS)
    except errors.Error as error:
        log.warning("that job %d is handed back isn't confirmed: %s", message.metadata.sequence.stream, error)
        return False
    return True
