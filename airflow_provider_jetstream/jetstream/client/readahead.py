"""Reads ahead for code that shows many dead letters and doesn't act on them; what it returns may be two seconds old.

A view of a hundred thousand letters reads several messages for each of them, one at a time but in order. Here the first
read also brings the messages behind it, and concurrent reads of last messages share one request.

Protocol: ADR-31, "JetStream Direct Get", with its batches, which servers support from 2.11 on.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import deque
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.direct_get import BATCHES, exact_streams, get_batch
from airflow_provider_jetstream.jetstream.client.message_reader import read_message
from airflow_provider_jetstream.jetstream.client.stream_api import list_streams, stored_sequences
from airflow_provider_jetstream.jetstream.errors import ApiError, PermissionDeniedError, UnreachableError, WireError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.client.stream_api import SequenceSet

_ALL = ">"
_WINDOW_MESSAGES = 256
_WINDOW_BYTES = 2**20
# A scan reads two positions of a stream in turn, and a person may turn pages at the same time.
_WINDOWS = 4
_FRESH_SECONDS = 2.0
# The server answers for up to 1,024 subjects in one request.
_MAX_SUBJECTS = 1_000
# Reads of last messages that come within this time share one request.
_COLLECT_SECONDS = 0.001
_sequence = attrgetter("sequence")


async def read_ahead(connection: Connection, queue: str, companions: Collection[str] = ()) -> Connection:
    """Return a view of a connection that reads ahead from those of a queue's streams that allow it.

    Of a work queue that allows no direct gets, the view knows at least which messages are gone.

    :param queue: the work queue's stream
    :param companions: the other streams of the queue
    :raises NotFoundError: the work queue doesn't exist
    :raises TransientError: the server doesn't answer
    """
    readers: dict[str, _ReadAheadStream | _KnownMissing] = {}
    if connection.api_level >= BATCHES:
        configs = [info["config"] for info in await list_streams(connection)]
        readers |= {name: _ReadAheadStream(connection, name) for name in exact_streams(configs, {queue, *companions})}
    if queue not in readers:
        readers[queue] = _KnownMissing(connection, queue, await stored_sequences(connection, queue))
    view = copy(connection)
    view.message_readers = {name: reader.read for name, reader in readers.items()}
    view.batch_readers = {
        name: reader.read_batch for name, reader in readers.items() if isinstance(reader, _ReadAheadStream)
    }
    return view


class _KnownMissing:
    """Reads from a stream whose missing messages are known; a message that is gone never comes back."""

    def __init__(self, connection: Connection, stream: str, stored: SequenceSet) -> None:
        self._connection = connection
        self._stream = stream
        self._stored = stored

    async def read(self, request: Mapping[str, Any]) -> StoredMessage | None:
        """Read one message by a request as ``MSG.GET`` takes it."""
        if request.keys() == {"seq"} and request["seq"] <= self._stored.last and request["seq"] not in self._stored:
            return None
        return await read_message(self._connection, self._stream, request)


@dataclass(frozen=True, slots=True)
class _Window:
    """Every message that a stream stored from one sequence to another, at one time.

    :param first: the first sequence
    :param messages: the messages in order
    :param read_at: when they were read, in seconds of the monotonic clock
    """

    first: int
    messages: Sequence[StoredMessage]
    read_at: float

    def covers(self, sequence: int) -> bool:
        # A window without messages was read at the end of the stream.
        return self.first <= sequence and (not self.messages or sequence <= self.messages[-1].sequence)

    def next(self, sequence: int) -> StoredMessage | None:
        """Return the first message from a sequence on."""
        index = bisect_left(self.messages, sequence, key=_sequence)
        return self.messages[index] if index < len(self.messages) else None

    def get(self, sequence: int) -> StoredMessage | None:
        """Return the message of a sequence."""
        message = self.next(sequence)
        return message if message and message.sequence == sequence else None


class _ReadAheadStream:
    """Reads ahead from one stream."""

    def __init__(self, connection: Connection, stream: str) -> None:
        self._connection = connection
        self._stream = stream
        # The newest first.
        self._windows: deque[_Window] = deque(maxlen=_WINDOWS)
        self._reading: asyncio.Task[_Window] | None = None
        # Subjects that the next request for last messages is to name.
        self._subjects: dict[str, asyncio.Future[StoredMessage | None]] = {}
        self._requests: set[asyncio.Task[None]] = set()
        self._is_allowed = True

    async def read(self, request: Mapping[str, Any]) -> StoredMessage | None:
        """Read one message by a request as ``MSG.GET`` takes it."""
        if self._is_allowed:
            with suppress(UnreachableError, ApiError, WireError), self._denials():
                match request:
                    case {"last_by_subj": subject}:
                        return await self._last(subject)
                    case {"seq": sequence, "next_by_subj": subject}:
                        if subject == _ALL:
                            return (await self._window(sequence)).next(sequence)
                    case {"seq": sequence}:
                        return (await self._window(sequence)).get(sequence)
        # The stream may allow no direct gets any more; if it is away, this request raises the error.
        return await read_message(self._connection, self._stream, request)

    async def read_batch(self, start: int, subject: str) -> list[StoredMessage]:
        """Read the first messages at or after a sequence whose subject matches a filter."""
        request = {"seq": start, "next_by_subj": subject}
        if self._is_allowed:
            with suppress(UnreachableError, ApiError, WireError), self._denials():
                batch = {"batch": _WINDOW_MESSAGES, "max_bytes": _WINDOW_BYTES}
                return await get_batch(self._connection, self._stream, request | batch)
        message = await read_message(self._connection, self._stream, request)
        return [message] if message else []

    @contextmanager
    def _denials(self) -> Iterator[None]:
        """Read one message at a time from now on where this user may send no direct gets."""
        try:
            yield
        except PermissionDeniedError:
            self._is_allowed = False

    async def _window(self, sequence: int) -> _Window:
        """Return a window that covers a sequence; one request reads for all that wait."""
        window = self._fresh_window(sequence)
        while window is None:
            if self._reading is None:
                self._reading = asyncio.create_task(self._read_window(sequence))
            # Shielded, since others may wait for the same task.
            window = await asyncio.shield(self._reading)
            if not window.covers(sequence):
                window = self._fresh_window(sequence)
        return window

    def _fresh_window(self, sequence: int) -> _Window | None:
        oldest = time.monotonic() - _FRESH_SECONDS
        return next((window for window in self._windows if window.covers(sequence) and window.read_at > oldest), None)

    async def _read_window(self, sequence: int) -> _Window:
        request = {"seq": sequence, "next_by_subj": _ALL, "batch": _WINDOW_MESSAGES, "max_bytes": _WINDOW_BYTES}
        try:
            window = _Window(sequence, await get_batch(self._connection, self._stream, request), time.monotonic())
            self._windows.appendleft(window)
            asyncio.get_running_loop().call_later(_FRESH_SECONDS, self._drop_old_windows)
            return window
        finally:
            self._reading = None

    def _drop_old_windows(self) -> None:
        oldest = time.monotonic() - _FRESH_SECONDS
        while self._windows and self._windows[-1].read_at <= oldest:
            self._windows.pop()

    async def _last(self, subject: str) -> StoredMessage | None:
        """Return the last message of a subject; one request reads for all that come shortly after one another."""
        loop = asyncio.get_running_loop()
        if (future := self._subjects.get(subject)) is None:
            if not self._subjects:
                loop.call_later(_COLLECT_SECONDS, self._request_last)
            future = self._subjects[subject] = loop.create_future()
        return await asyncio.shield(future)

    def _request_last(self) -> None:
        subjects, self._subjects = list(self._subjects.items()), {}
        for start in range(0, len(subjects), _MAX_SUBJECTS):
            task = asyncio.create_task(self._resolve_last(dict(subjects[start : start + _MAX_SUBJECTS])))
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)

    async def _resolve_last(self, futures: Mapping[str, asyncio.Future[StoredMessage | None]]) -> None:
        try:
            messages = await get_batch(self._connection, self._stream, {"multi_last": list(futures)})
        except BaseException as error:
            for future in futures.values():
                # A future is done already where its reader was cancelled.
                if not future.done():
                    future.set_exception(error)
                    # Marks the exception as retrieved, so that asyncio doesn't log it for a reader that has gone.
                    future.exception()
            if not isinstance(error, Exception):
                raise
            return
        by_subject = {message.subject: message for message in messages}
        for subject, future in futures.items():
            if not future.done():
                future.set_result(by_subject.get(subject))
