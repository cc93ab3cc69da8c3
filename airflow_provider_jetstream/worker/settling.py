"""Sending what settles a job until the server has confirmed it."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

log = logging.getLogger("jetstream.worker")

# What is sent while the connection breaks is lost; waiting long for its answer would let the ack wait pass.
ANSWER_SECONDS = 2.0
PAUSE_AFTER_FAILURE = 0.5
_SETTLE_SECONDS = 30.0


async def insist(send: Callable[[], Awaitable[object]], what: str) -> None:
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
