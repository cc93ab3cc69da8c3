"""The reader of stored messages: many at a time, in the fastest way that is as exact as the stream's leader.

Batches of direct gets are sent to streams that answer them exactly (:func:`find_exact_streams`); of any other stream
each message is read by ``MSG.GET``, many requests at a time. What was read is what a method returns.

Protocol: ADR-31, "JetStream Direct Get".
"""

from __future__ import annotations

import json
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.client.direct_get import (
    BATCHES,
    exact_streams,
    get_last_messages,
    with_exact_subject,
)
from airflow_provider_jetstream.jetstream.client.message import parse_msg_get
from airflow_provider_jetstream.jetstream.client.message_reader import REFUSALS, next_message, read_batches, read_range
from airflow_provider_jetstream.jetstream.client.stream_api import list_streams
from airflow_provider_jetstream.jetstream.errors import TransientError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage

# A range is read as a whole where at least one of so many of its sequences is wanted.
_SPARSE: Final = 2
# Below so many, single reads take no longer than finding out whether batches are exact.
_FEW: Final = 512


async def find_exact_streams(connection: Connection, streams: Collection[str]) -> Connection:
    """Return a connection that knows which of some streams answer direct gets as exactly as their leader.

    It takes requests for the configurations of all streams of the account: it isn't worth it for few messages.

    :raises TransientError: the server doesn't answer
    """
    view = copy(connection)
    if connection.api_level >= BATCHES:
        configs = [info["config"] for info in await list_streams(connection)]
        view.exact_streams = frozenset(exact_streams(configs, streams))
    return view


class Streams:
    """Reads stored messages over a connection.

    :param connection: knows which streams answer direct gets exactly; of the others their leaders are asked
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def get_many(self, stream: str, sequences: Sequence[int]) -> dict[int, StoredMessage | None]:
        """Read messages by their sequences, which are in order; ``None`` where one isn't stored."""
        read: dict[int, StoredMessage | None] = dict.fromkeys(sequences)
        if self._is_exact(stream) and sequences and sequences[-1] - sequences[0] < _SPARSE * len(sequences):
            with suppress(*REFUSALS):
                async for message in read_batches(self._connection, stream, ">", sequences[0], sequences[-1]):
                    if message.sequence in read:
                        read[message.sequence] = message
                return read
        messages_by_request = await self._get_each(stream, [b'{"seq":%d}' % sequence for sequence in sequences])
        return dict(zip(sequences, messages_by_request, strict=True))

    async def last_many(self, stream: str, subjects: Sequence[str]) -> dict[str, StoredMessage | None]:
        """Read the last messages of subjects, whatever they are; ``None`` where a subject has none."""
        read: dict[str, StoredMessage | None] = dict.fromkeys(subjects)
        if self._is_exact(stream) and subjects:
            with suppress(*REFUSALS):
                messages = await get_last_messages(self._connection, stream, list(read))
                return read | {message.subject: message for message in messages}
        requests = [json.dumps({"last_by_subj": subject}).encode() for subject in read]
        return dict(zip(read, await self._get_each(stream, requests), strict=True))

    def range(
        self, stream: str, subject: str = ">", start: int = 1, stop: int | None = None
    ) -> AsyncGenerator[StoredMessage, None]:
        """Read in order what a stream stores now; the parameters are those of :func:`~.message_reader.read_range`."""
        return read_range(self._connection, stream, subject, start, stop)

    def _is_exact(self, stream: str) -> bool:
        return stream in self._connection.exact_streams

    async def _get_each(self, stream: str, requests: Sequence[bytes]) -> list[StoredMessage | None]:
        subject = f"{self._connection.api_prefix}.STREAM.MSG.GET.{stream}"
        messages: list[StoredMessage | None] = []
        for answer in await self._connection.request_many([(subject, request) for request in requests]):
            if isinstance(answer, TransientError):
                raise answer
            message = parse_msg_get(answer, stream)
            messages.append(await with_exact_subject(self._connection, stream, message) if message else None)
        return messages


async def read_bulk(connection: Connection, info: Mapping[str, Any], start: int) -> AsyncGenerator[StoredMessage, None]:
    """Read in order every message of a stream from a sequence on, by batches where there is much of it.

    :param info: the server's STREAM.INFO of the stream; later messages aren't read
    """
    stream, stop = info["config"]["name"], int(info["state"]["last_seq"])
    start = max(start, int(info["state"]["first_seq"]), 1)
    if stop - start >= _FEW and stream not in connection.exact_streams:
        connection = await find_exact_streams(connection, {stream})
    if start <= stop:
        async for message in read_range(connection, stream, ">", start, stop):
            yield message


async def first_since(connection: Connection, info: Mapping[str, Any], moment: datetime) -> int:
    """Return a sequence of a stream before which everything was stored before a moment, by binary search.

    :param info: the server's STREAM.INFO of the stream
    """
    low, high = max(1, int(info["state"]["first_seq"])), int(info["state"]["last_seq"]) + 1
    while high - low > _FEW:
        middle = (low + high) // 2
        message = await next_message(connection, info["config"]["name"], middle, ">")
        if message is not None and message.stored_at < moment:
            low = message.sequence + 1
        else:
            high = middle
    return low
