"""Reads stored messages: one by sequence or subject, a range, or all that are stored from now on.

Reading without a consumer works with every retention policy, takes no job away from a worker, and leaves nothing behind
on the server. Messages are read by ``MSG.GET``, which the stream's leader answers: a direct get may be behind. Ranges
of streams of which the connection knows that their direct gets are as exact are read in batches.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.client.concurrency import MAX_CONCURRENT, map_concurrently, pause_if_due
from airflow_provider_jetstream.jetstream.client.direct_get import get_limited_batch, with_exact_subject
from airflow_provider_jetstream.jetstream.client.message import parse_msg_get
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.subjects import covers
from airflow_provider_jetstream.jetstream.errors import ApiError, TransientError, UnreachableError, WireError
from airflow_provider_jetstream.jetstream.evidence import proves_nothing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError

log = logging.getLogger(__name__)

# A subscriber receives a message a little before the stream has stored it.
_STORE_DELAYS = (0.0, 0.005, 0.02, 0.1)
_POLL_SECONDS = 2.0
_RETRY_PAUSE = 1.0

# The stream may allow no direct gets any more. If it is away, the requests to its leader raise the error.
REFUSALS: Final = (ApiError, TransientError, WireError)
# Before other tasks of the event loop may run.
_READ_AT_ONCE = 32
_FIRST_WIDTH = 32
_LEAST_SIZE = 1024
_MAX_BYTES_AT_ONCE = 16 * 2**20


async def get_message(connection: Connection, stream: str, sequence: int) -> StoredMessage | None:
    """Read the message of a sequence; ``None`` where it isn't stored any more.

    :param stream: the name of the stream
    :param sequence: the message's stream sequence
    :raises NotFoundError: the stream doesn't exist
    """
    return await msg_get(connection, stream, {"seq": sequence})


async def next_message(connection: Connection, stream: str, start: int, subject: str) -> StoredMessage | None:
    """Read the first message at or after a sequence whose subject matches a filter; ``None`` where there is none yet.

    :raises NotFoundError: the stream doesn't exist
    """
    return await msg_get(connection, stream, {"seq": start, "next_by_subj": subject})


async def last_message(connection: Connection, stream: str, subject: str) -> StoredMessage | None:
    """Read the last message of a subject that is what the subject is for; ``None`` where there is none.

    What else is stored there is passed by: see :mod:`~airflow_provider_jetstream.jetstream.evidence`.

    :raises NotFoundError: the stream doesn't exist
    """
    return (await last_with_position(connection, stream, subject))[0]


async def last_with_position(connection: Connection, stream: str, subject: str) -> tuple[StoredMessage | None, int]:
    """Read what :func:`last_message` does, and the sequence of the subject's last message, whatever that is.

    What replaces the message is stored on condition that this one is still the last; 0 where there is none.

    :raises NotFoundError: the stream doesn't exist
    """
    message = await msg_get(connection, stream, {"last_by_subj": subject})
    if message is None:
        return None, 0
    if not proves_nothing(message):
        return message, message.sequence
    found = None
    async for earlier in read_range(connection, stream, subject, stop=message.sequence):
        found = found if proves_nothing(earlier) else earlier
    return found, message.sequence


async def msg_get(connection: Connection, stream: str, request: Mapping[str, Any]) -> StoredMessage | None:
    """Read one message from the stream's leader by a request as ``MSG.GET`` takes it.

    :raises NotFoundError: the stream doesn't exist
    """
    answer = await connection.api_request(f"STREAM.MSG.GET.{stream}", json.dumps(request).encode())
    message = parse_msg_get(answer, stream)
    return await with_exact_subject(connection, stream, message) if message else None


async def read_range(
    connection: Connection, stream: str, subject: str = ">", start: int = 1, stop: int | None = None
) -> AsyncGenerator[StoredMessage, None]:
    """Read in order what a stream stores now: many requests at a time, few messages in memory.

    :param subject: a filter
    :param start: the first sequence
    :param stop: the last sequence; where absent, the stream's last one at the time of the call
    :raises NotFoundError: the stream doesn't exist
    """
    if stop is None:
        stop = int((await stream_info(connection, stream))["state"]["last_seq"])
    if stream in connection.exact_streams:
        with suppress(*REFUSALS):
            async for message in read_batches(connection, stream, subject, start, stop):
                yield message
                start = message.sequence + 1
            return
    async for message in _read_concurrently(connection, stream, subject, start, stop):
        yield message


async def read_batches(
    connection: Connection, stream: str, subject: str, start: int, stop: int
) -> AsyncGenerator[StoredMessage, None]:
    """Read in order a range of a stream whose direct gets are exact.

    :raises ApiError: the stream allows no direct gets any more, as for the other :data:`REFUSALS`
    """
    while start <= stop:
        request = {"seq": start, "next_by_subj": subject}
        messages = await get_limited_batch(connection, stream, request, stop - start + 1)
        for number, message in enumerate(messages):
            if message.sequence > stop:
                return
            yield message
            if number % _READ_AT_ONCE == 0:
                await pause_if_due()
        if not messages:
            return
        start = messages[-1].sequence + 1


async def _read_concurrently(
    connection: Connection, stream: str, subject: str, start: int, stop: int
) -> AsyncGenerator[StoredMessage, None]:
    async def read(sequence: int) -> StoredMessage | None:
        return await get_message(connection, stream, sequence)

    width, largest = _FIRST_WIDTH, _LEAST_SIZE
    while start <= stop:
        # The server skips gaps and messages of other subjects for a request for the next message only.
        head = await next_message(connection, stream, start, subject)
        if head is None or head.sequence > stop:
            return
        yield head
        start = min(head.sequence + width, stop) + 1
        matching = 0
        for message in await map_concurrently(read, range(head.sequence + 1, start)):
            if message is not None and covers(subject, message.subject):
                matching += 1
                largest = max(largest, len(message.data))
                yield message
        # So the width follows how densely the matching messages are stored.
        width = min(width * 2, MAX_CONCURRENT) if matching * 2 >= width else max(width // 4, 1)
        width = max(1, min(width, _MAX_BYTES_AT_ONCE // largest))


def _warn(stream: str, subject: str, denial: PermissionDeniedError) -> None:
    if denial.action == "subscribe" and denial.subject == subject:
        log.warning("%s is read only every %g seconds: %s", stream, _POLL_SECONDS, denial)


async def follow(connection: Connection, stream: str, subject: str, start: int) -> AsyncGenerator[StoredMessage, None]:
    """Read what is stored from a sequence on, and go on with what is stored later, without end and without a gap.

    A plain subscription only signals that the stream may have a new message. The message itself is read from the
    stream, so none is missed while the connection or the server is away.

    :param subject: a filter
    :param start: the first sequence
    :raises NotFoundError: the stream doesn't exist
    :raises UnreachableError: the connection is closed for good
    """
    arrived = asyncio.Event()

    try:
        subscription = await connection.subscribe_raw(
            subject, lambda *_: arrived.set(), partial(_warn, stream, subject)
        )
    except UnreachableError as error:
        raise UnreachableError(f"{stream} can't be followed: {error}; open a new connection") from None
    try:
        while True:
            arrived.clear()
            message: StoredMessage | None = None
            for delay in _STORE_DELAYS:
                await asyncio.sleep(delay)
                try:
                    message = await next_message(connection, stream, start, subject)
                except TransientError as error:
                    if connection.is_closed:
                        raise UnreachableError(
                            f"the connection is closed while following {stream}: open a new one and go on from"
                            f" sequence {start}"
                        ) from None
                    log.warning("Reading %s failed, trying again: %s", stream, error)
                    await asyncio.sleep(_RETRY_PAUSE)
                    continue
                if message is not None:
                    break
            if message is not None:
                start = message.sequence + 1
                # The stream may store more behind it: read again before waiting.
                arrived.set()
                yield message
            with suppress(TimeoutError):
                # Not wait_for: before Python 3.12 it can swallow a cancellation that comes together with the signal.
                async with asyncio.timeout(_POLL_SECONDS):
                    await arrived.wait()
    finally:
        with suppress(Exception):
            await subscription.unsubscribe()
