"""Reads what a stream has stored since an earlier look: in batches where there is much of it and batches are exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.direct_get import BATCHES, exact_streams, get_batch
from airflow_provider_jetstream.jetstream.client.message_reader import next_message, read_range
from airflow_provider_jetstream.jetstream.client.stream_api import list_streams
from airflow_provider_jetstream.jetstream.errors import ApiError, TransientError, WireError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage

# Below so many, single reads take no longer than finding out whether batches are exact.
_FEW = 512
_BATCH_MESSAGES = 512
_BATCH_BYTES = 2**20


async def read_bulk(connection: Connection, info: Mapping[str, Any], start: int) -> AsyncGenerator[StoredMessage, None]:
    """Read in order every message of a stream from a sequence on.

    :param info: the server's STREAM.INFO of the stream; later messages aren't read
    """
    stream, stop = info["config"]["name"], int(info["state"]["last_seq"])
    start = max(start, int(info["state"]["first_seq"]), 1)
    has_reader = stream in connection.batch_readers
    if stop - start >= _FEW and not has_reader and await _has_exact_batches(connection, stream):
        try:
            while start <= stop:
                request = {"seq": start, "next_by_subj": ">", "batch": _BATCH_MESSAGES, "max_bytes": _BATCH_BYTES}
                messages = await get_batch(connection, stream, request)
                for message in messages:
                    if message.sequence > stop:
                        return
                    yield message
                    start = message.sequence + 1
                if not messages:
                    break
        except (TransientError, ApiError, WireError):
            # Single reads go on where the batches ended, and raise the error if it lasts.
            pass
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


async def _has_exact_batches(connection: Connection, stream: str) -> bool:
    if connection.api_level < BATCHES:
        return False
    configs = [info["config"] for info in await list_streams(connection)]
    return stream in exact_streams(configs, {stream})
