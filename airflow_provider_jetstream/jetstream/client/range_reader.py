"""Reading many stored messages: in order, many requests on their way at a time, few messages held."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.concurrency import MAX_CONCURRENT, map_concurrently
from airflow_provider_jetstream.jetstream.client.stream_api import get_message, next_message, stream_info
from airflow_provider_jetstream.jetstream.client.subjects import covers

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage


_BYTES_AT_A_TIME = 16 * 2**20


async def read_range(
    connection: Connection, stream: str, subject: str = ">", start: int = 1, stop: int | None = None
) -> AsyncGenerator[StoredMessage, None]:
    """Read what a stream holds now, from one sequence to another.

    :param connection: the server
    :param stream: the stream
    :param subject: a filter
    :param start: the first sequence
    :param stop: the last sequence; where absent, the stream's last one at the time of the call
    :return: the messages in order
    :raises NotFoundError: the stream doesn't exist
    """
    if stop is None:
        stop = int((await stream_info(connection, stream))["state"]["last_seq"])
    read = _in_runs if stream in connection.runs else _one_by_one
    async for message in read(connection, stream, subject, start, stop):
        yield message


async def _in_runs(
    connection: Connection, stream: str, subject: str, start: int, stop: int
) -> AsyncGenerator[StoredMessage, None]:
    while start <= stop and (messages := await connection.runs[stream](start, subject)):
        for message in messages:
            if message.sequence <= stop:
                yield message
        start = messages[-1].sequence + 1


async def _one_by_one(
    connection: Connection, stream: str, subject: str, start: int, stop: int
) -> AsyncGenerator[StoredMessage, None]:
    width, heaviest = 32, 1024
    while start <= stop:
        head = await next_message(connection, stream, start, subject)
        if head is None or head.sequence > stop:
            return
        yield head
        start = min(head.sequence + width, stop) + 1

        async def read(sequence: int) -> StoredMessage | None:
            return await get_message(connection, stream, sequence)

        matching = 0
        for message in await map_concurrently(read, range(head.sequence + 1, start)):
            if message is not None and covers(subject, message.subject):
                matching += 1
                heaviest = max(heaviest, len(message.data))
                yield message
        # Gaps, and messages of others, are skipped by the server when asked for one message at a time.
        width = min(width * 2, MAX_CONCURRENT) if matching * 2 >= width else max(width // 4, 1)
        width = max(1, min(width, _BYTES_AT_A_TIME // heaviest))
