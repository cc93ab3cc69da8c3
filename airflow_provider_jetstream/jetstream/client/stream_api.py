"""Reading what a stream has stored, by sequence, without a consumer.

A read without a consumer works on every retention, takes nothing away from workers, and leaves nothing behind on the
server. ``MSG.GET`` is used throughout because it is answered by the stream's leader: a direct get may be behind.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.client.message import StoredMessage, message_of
from airflow_provider_jetstream.jetstream.errors import ApiError, NotFoundError, TransientError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.client.connection import Connection


log = logging.getLogger(__name__)

NO_MESSAGE: Final = 10037
_NO_STREAM = 10059
_NO_CONSUMER = 10014

# A subscriber hears of a message a little before the stream has stored it.
_STORE_DELAYS = (0.0, 0.005, 0.02, 0.1)
_LOOK_ANYWAY = 2.0
_RETRY_PAUSE = 1.0


async def get_message(connection: Connection, stream: str, sequence: int) -> StoredMessage | None:
    """Read one message.

    :param connection: the server
    :param stream: the stream
    :param sequence: the message's sequence
    :return: the message, ``None`` where it is no longer stored
    :raises NotFoundError: the stream doesn't exist
    """
    return await _get(connection, stream, {"seq": sequence})


async def next_message(connection: Connection, stream: str, start: int, subject: str) -> StoredMessage | None:
    """Read the first message at or after a sequence.

    :param connection: the server
    :param stream: the stream
    :param start: the first sequence to consider
    :param subject: a filter
    :return: the message, ``None`` where there is none yet
    :raises NotFoundError: the stream doesn't exist
    """
    return await _get(connection, stream, {"seq": start, "next_by_subj": subject})


async def last_message(connection: Connection, stream: str, subject: str) -> StoredMessage | None:
    """Read the last message of a subject.

    :param connection: the server
    :param stream: the stream
    :param subject: the subject
    :return: the message, ``None`` where there is none
    :raises NotFoundError: the stream doesn't exist
    """
    return await _get(connection, stream, {"last_by_subj": subject})


async def stream_info(connection: Connection, stream: str) -> dict[str, Any]:
    """Read a stream's configuration and state.

    :param connection: the server
    :param stream: the stream
    :return: the server's answer
    :raises NotFoundError: the stream doesn't exist
    """
    try:
        return await connection.api(f"STREAM.INFO.{stream}")
    except ApiError as error:
        raise not_found(error, f"stream {stream}") from None


async def consumer_info(connection: Connection, stream: str, consumer: str) -> dict[str, Any]:
    """Read a consumer's configuration and state.

    :param connection: the server
    :param stream: its stream
    :param consumer: its name
    :return: the server's answer
    :raises NotFoundError: the stream or the consumer doesn't exist
    """
    try:
        return await connection.api(f"CONSUMER.INFO.{stream}.{consumer}")
    except ApiError as error:
        raise not_found(error, f"consumer {consumer} of stream {stream}") from None


async def consumer_names(connection: Connection, stream: str) -> list[str]:
    """Name a stream's consumers, all pages of them.

    :param connection: the server
    :param stream: the stream
    :return: the names
    :raises NotFoundError: the stream doesn't exist
    """
    names: list[str] = []
    while True:
        try:
            answer = await connection.api(f"CONSUMER.NAMES.{stream}", {"offset": len(names)})
        except ApiError as error:
            raise not_found(error, f"stream {stream}") from None
        page: list[str] = answer.get("consumers") or []
        names += page
        if not page or len(names) >= answer.get("total", 0):
            return names


async def subject_counts(connection: Connection, stream: str, subject: str) -> AsyncGenerator[tuple[str, int], None]:
    """Count the stored messages of each subject, all pages of them.

    :param connection: the server
    :param stream: the stream
    :param subject: a filter
    :return: each subject with its number of messages
    :raises ApiError: the server refused to tell
    """
    offset = 0
    while True:
        answer = await connection.api(f"STREAM.INFO.{stream}", {"subjects_filter": subject, "offset": offset})
        page: dict[str, int] = answer["state"].get("subjects") or {}
        for item in page.items():
            yield item
        offset += len(page)
        if not page or offset >= answer.get("total", 0):
            return


async def follow(connection: Connection, stream: str, subject: str, start: int) -> AsyncGenerator[StoredMessage, None]:
    """Read what is stored from a sequence on, then go on as more is stored, without end and without a gap.

    A plain subscription serves as a doorbell only: what counts is read from the stream, so nothing is missed while the
    connection or the server is away.

    :param connection: the server
    :param stream: the stream
    :param subject: a filter
    :param start: the first sequence
    :return: the messages in order
    :raises NotFoundError: the stream doesn't exist
    :raises UnreachableError: the connection was closed, so that it won't come back by itself
    """
    from nats import errors

    bell = asyncio.Event()

    async def ring(_: Msg) -> None:
        bell.set()

    try:
        doorbell = await connection.client.subscribe(subject, cb=ring)
    except errors.Error as error:
        raise UnreachableError(f"{stream} can't be followed: {error}; open a new connection") from None
    try:
        while True:
            bell.clear()
            message: StoredMessage | None = None
            for delay in _STORE_DELAYS:
                await asyncio.sleep(delay)
                try:
                    message = await next_message(connection, stream, start, subject)
                except TransientError as error:
                    if connection.client.is_closed:
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
                # There may be more behind it; look again before listening.
                bell.set()
                yield message
            with suppress(TimeoutError):
                # Not wait_for: before Python 3.12 it can swallow a cancellation that comes as the bell rings.
                async with asyncio.timeout(_LOOK_ANYWAY):
                    await bell.wait()
    finally:
        with suppress(Exception):
            await doorbell.unsubscribe()


async def _get(connection: Connection, stream: str, request: dict[str, Any]) -> StoredMessage | None:
    if read := connection.direct.get(stream):
        return await read(request)
    try:
        answer = await connection.api(f"STREAM.MSG.GET.{stream}", request)
    except ApiError as error:
        if error.err_code == NO_MESSAGE:
            return None
        raise not_found(error, f"stream {stream}") from None
    return message_of(answer)


def not_found(error: ApiError, what: str) -> Exception:
    """Give the error that says that something doesn't exist, where that is what the server means.

    :param error: the server's refusal
    :param what: what was asked about
    :return: what to raise
    """
    if error.err_code in (_NO_STREAM, _NO_CONSUMER):
        return NotFoundError(f"expected {what} on the server, found none: provision the queue first, or check the name")
    return error


async def list_streams(connection: Connection) -> list[dict[str, Any]]:
    """Read the configuration and state of all streams, a request for each page of them.

    :param connection: the server
    :return: the server's answers
    :raises ApiError: the server refused to tell
    """
    found: list[dict[str, Any]] = []
    while True:
        answer = await connection.api("STREAM.LIST", {"offset": len(found)})
        page: list[dict[str, Any]] = answer.get("streams") or []
        found += page
        if not page or len(found) >= answer.get("total", 0):
            return found
