"""Reads at once the messages that a block announces, on an event loop: by batches, or by many requests at a time.

Batches of direct gets are sent to streams that answer them as exactly as their leader; of any other stream each message
is read by ``MSG.GET``. What was read counts only inside the block that announced it, and for its task.

Protocol: ADR-31, "JetStream Direct Get".
"""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from contextvars import ContextVar
from copy import copy
from typing import TYPE_CHECKING, Any, TypeAlias

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.connection import ReadPlan
from airflow_provider_jetstream.jetstream.client.direct_get import (
    BATCHES,
    exact_streams,
    get_last_messages,
    get_limited_batch,
    with_exact_subject,
)
from airflow_provider_jetstream.jetstream.client.message import parse_msg_get
from airflow_provider_jetstream.jetstream.client.message_reader import msg_get
from airflow_provider_jetstream.jetstream.client.stream_api import list_streams
from airflow_provider_jetstream.jetstream.errors import ApiError, TransientError, UnreachableError, WireError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Announced, Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage

# By sequence or subject; ``None`` where no such message is stored.
_Messages: TypeAlias = "dict[int | str, StoredMessage | None]"

# A range is read as a whole where at least one of so many of its sequences is wanted.
_SPARSE = 2
# The block's messages by stream, and the view through which they were read.
_announced: ContextVar[tuple[object, Mapping[str, _Messages]] | None] = ContextVar("announced", default=None)


async def read_announced(connection: Connection, streams: Collection[str], *, batches: bool) -> Connection:
    """Return a view of a connection that reads at once what :meth:`~.connection.Connection.prefetch` announces.

    A connection that has readers of its own is returned as it is.

    :param streams: the streams that are read
    :param batches: whether to find out which streams answer batches exactly, which takes requests for the
        configurations of all streams of the account: it isn't worth it for few messages
    :raises TransientError: the server doesn't answer
    """
    if connection.message_readers or connection.batch_readers:
        return connection
    exact: Collection[str] = ()
    if batches and connection.api_level >= BATCHES:
        exact = exact_streams([info["config"] for info in await list_streams(connection)], streams)
    readers = {name: _AnnouncedReader(connection, name, is_exact=name in exact) for name in streams}
    view = copy(connection)
    view.message_readers = {name: reader.get for name, reader in readers.items()}
    view.batch_readers = {name: readers[name].get_run for name in exact}

    @asynccontextmanager
    async def prefetch(plans: Iterable[ReadPlan]) -> AsyncIterator[Announced]:
        read: dict[str, _Messages] = {}

        async def read_plan(plan: ReadPlan) -> None:
            if reader := readers.get(plan.stream):
                read.setdefault(plan.stream, {}).update(await reader.read(plan.sequences, plan.subjects))

        first, *others = [*plans] or [ReadPlan("")]
        # What ends a job is stored before the job is removed, so the others are read after it.
        await read_plan(first)
        await map_concurrently(read_plan, others)
        token = _announced.set((readers, read))
        try:
            yield read
        finally:
            _announced.reset(token)

    for reader in readers.values():
        reader.view = readers
    view.prefetch = prefetch  # type: ignore[method-assign]
    return view


class _AnnouncedReader:
    """Reads messages of one stream."""

    def __init__(self, connection: Connection, stream: str, *, is_exact: bool) -> None:
        self.view: object = None
        self._connection = connection
        self._stream = stream
        self._is_exact = is_exact

    async def get(self, request: Mapping[str, Any]) -> StoredMessage | None:
        """Read one message by a request as ``MSG.GET`` takes it."""
        if len(request) == 1 and (announced := _announced.get()) and announced[0] is self.view:
            (key,) = request.values()
            messages = announced[1].get(self._stream, {})
            if key in messages:
                return messages[key]
        return await msg_get(self._connection, self._stream, request)

    async def get_run(self, start: int, subject: str) -> list[StoredMessage]:
        """Read the next messages from a sequence on whose subjects match a filter, in order; empty at the end."""
        try:
            return await get_limited_batch(self._connection, self._stream, {"seq": start, "next_by_subj": subject})
        except (ApiError, UnreachableError, WireError):
            # The stream may allow no direct gets any more; if it is away, this request raises the error.
            message = await msg_get(self._connection, self._stream, {"seq": start, "next_by_subj": subject})
            return [message] if message else []

    async def read(self, sequences: Sequence[int], subjects: Sequence[str]) -> _Messages:
        """Read messages by their sequences, which are in order, and the last ones of subjects."""
        read: _Messages = dict.fromkeys((*sequences, *subjects))
        if self._is_exact:
            try:
                if subjects:
                    read |= {
                        message.subject: message
                        for message in await get_last_messages(self._connection, self._stream, subjects)
                    }
                if sequences and sequences[-1] - sequences[0] < _SPARSE * len(sequences):
                    read |= {message.sequence: message for message in await self._range(sequences)}
                    return read
                subjects = ()
            except (ApiError, TransientError, WireError):
                # The stream may allow no direct gets any more; if it is away, the requests below raise the error.
                pass
        keys: list[int | str] = [*sequences, *subjects]
        requests = [{"seq": key} if isinstance(key, int) else {"last_by_subj": key} for key in keys]
        for key, message in zip(keys, await self._get_each(requests), strict=True):
            read[key] = message
        return read

    async def _get_each(self, requests: Sequence[Mapping[str, Any]]) -> list[StoredMessage | None]:
        subject = f"{self._connection.api_prefix}.STREAM.MSG.GET.{self._stream}"
        answers = await self._connection.request_many([(subject, json.dumps(request).encode()) for request in requests])
        messages: list[StoredMessage | None] = []
        for answer in answers:
            if isinstance(answer, TransientError):
                raise answer
            message = parse_msg_get(answer, self._stream)
            messages.append(await with_exact_subject(self._connection, self._stream, message) if message else None)
        return messages

    async def _range(self, sequences: Sequence[int]) -> list[StoredMessage]:
        start, stop, wanted = sequences[0], sequences[-1], frozenset(sequences)
        messages: list[StoredMessage] = []
        while start <= stop:
            request = {"seq": start, "next_by_subj": ">"}
            run = await get_limited_batch(self._connection, self._stream, request, stop - start + 1)
            if not run:
                break
            messages += [message for message in run if message.sequence in wanted]
            start = run[-1].sequence + 1
        return messages
