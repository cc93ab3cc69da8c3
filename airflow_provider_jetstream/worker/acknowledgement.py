"""Acknowledgements of NATS ADR-15: nak, and the repetition of ack and term until they are confirmed."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.message_reader import get_message
from airflow_provider_jetstream.jetstream.client.wire import encode_message
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    PermissionDeniedError,
    TransientError,
    UnreachableError,
)
from airflow_provider_jetstream.worker.dead_letter_target import is_same_message

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.worker.pulled_message import PulledMessage

log = logging.getLogger("jetstream.worker")

# Short: an acknowledgement that is sent while the connection breaks is lost, and the ack wait passes meanwhile.
ANSWER_TIMEOUT = 2.0
PAUSE_AFTER_FAILURE = 0.5
_CONFIRM_TIMEOUT = 30.0


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

    The server takes what is sent to an acknowledgement subject for whatever job has the sequence. After a loss of power
    that is one which was stored since: it would be lost, or run twice.
    """
    try:
        stored = await get_message(connection, message.stream, message.sequence)
    except PermissionDeniedError:
        # An older user of the worker may not read it.
        return True
    return stored is not None and is_same_message(stored, message)


async def end_delivery(
    connection: Connection, message: PulledMessage, payload: bytes, what: str, *, reconnects: int | None
) -> None:
    """Acknowledge or terminate a message until that is confirmed, or the message isn't stored any more.

    :param what: names the request in the log
    :param reconnects: those of the connection when the message was delivered; ``None`` where the request may have been
        sent before
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
            # One that isn't acknowledged comes again.
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
