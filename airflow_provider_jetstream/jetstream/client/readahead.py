"""Reading single messages many at a time, by direct gets, for whoever looks at letters and doesn't act on them.

A look at a hundred thousand letters reads several messages for each of them, one by one but in order. Here the first
one that is asked for brings those behind it along, and the last messages of subjects that are asked for side by side
come together.

Protocol: ADR-31, "JetStream Direct Get", with its batches, which servers know from 2.11 on.
"""

from __future__ import annotations

import asyncio
import json
import time
from bisect import bisect_left
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

from airflow_provider_jetstream.jetstream.client.connection import Connection
from airflow_provider_jetstream.jetstream.client.direct_get import BATCHES, STATUS, exact_streams, stored_message
from airflow_provider_jetstream.jetstream.client.sequence_set import stored_sequences
from airflow_provider_jetstream.jetstream.client.stream_api import get_message, last_message, list_streams, next_message
from airflow_provider_jetstream.jetstream.errors import DeadlineError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.client.nats_py import JetStreamClient
    from airflow_provider_jetstream.jetstream.client.sequence_set import SequenceSet

_BATCH = 256
_ALL = ">"
_BYTES = 2**20
# A look reads two places of a stream in turn, and people leaf through it meanwhile.
_WINDOWS = 4
_FRESH_SECONDS = 2.0
# The server answers for a thousand and twenty-four.
_SUBJECTS = 1_000
_GATHERING_SECONDS = 0.001
_TOLD_SEQUENCE = b"\r\nNats-Sequence: "
_sequence = attrgetter("sequence")


class ReadAheadConnection(Connection):
    """A connection that reads ahead; its answers may be two seconds old. Make it with :meth:`over`.

    :param connection: the connection whose client it shares
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection.client, connection.timeout)
        self.api_level = connection.api_level

    @classmethod
    async def over(cls, connection: Connection, queue: str, companions: Collection[str] = ()) -> ReadAheadConnection:
        """Find out which of a queue's streams can be read ahead.

        Of a queue that takes no direct gets it is known at least which messages are gone.

        :param connection: the connection
        :param queue: the work queue's stream
        :param companions: the streams beside it
        :return: a connection to look at its letters with
        :raises NotFoundError: the queue doesn't exist
        :raises TransientError: the server doesn't answer
        """
        found = cls(connection)
        ways: dict[str, _ReadAheadStream | _KnownMissing] = {
            queue: _KnownMissing(connection, queue, await stored_sequences(connection, queue))
        }
        if connection.api_level >= BATCHES:
            configs = [info["config"] for info in await list_streams(connection)]
            ways |= {name: _ReadAheadStream(connection, name) for name in exact_streams(configs, {queue, *companions})}
        found.direct = {name: way.read for name, way in ways.items()}
        return found


@dataclass(frozen=True, slots=True)
class _Window:
    """All that a stream held from one sequence to another."""

    first: int
    messages: Sequence[StoredMessage]
    read_at: float

    def covers(self, sequence: int) -> bool:
        # Where nothing came there is nothing from there on.
        return self.first <= sequence and (not self.messages or sequence <= self.messages[-1].sequence)

    def after(self, sequence: int) -> StoredMessage | None:
        """Give the first message from a sequence on."""
        place = bisect_left(self.messages, sequence, key=_sequence)
        return self.messages[place] if place < len(self.messages) else None

    def at(self, sequence: int) -> StoredMessage | None:
        """Give the message of a sequence."""
        found = self.after(sequence)
        return found if found and found.sequence == sequence else None


class _KnownMissing:
    """A stream of which it is known which messages are gone; they never come back."""

    def __init__(self, connection: Connection, stream: str, present: SequenceSet) -> None:
        self._connection = connection
        self._stream = stream
        self._present = present

    async def read(self, request: Mapping[str, Any]) -> StoredMessage | None:
        """Answer a request for one message."""
        if request.keys() == {"seq"} and request["seq"] <= self._present.last and request["seq"] not in self._present:
            return None
        return await _one(self._connection, self._stream, request)


class _ReadAheadStream:
    """A stream that is read ahead."""

    def __init__(self, connection: Connection, stream: str) -> None:
        self._connection = connection
        self._stream = stream
        self._windows: deque[_Window] = deque(maxlen=_WINDOWS)
        self._reading: asyncio.Task[_Window] | None = None
        self._asked: dict[str, asyncio.Future[StoredMessage | None]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    async def read(self, request: Mapping[str, Any]) -> StoredMessage | None:
        """Answer a request for one message."""
        with suppress(UnreachableError):
            match request:
                case {"last_by_subj": subject}:
                    return await self._last(subject)
                case {"seq": sequence, "next_by_subj": subject}:
                    if subject == _ALL:
                        return (await self._around(sequence)).after(sequence)
                case {"seq": sequence}:
                    return (await self._around(sequence)).at(sequence)
        # Also where the stream takes no direct gets any more; if it is away, this says so.
        return await _one(self._connection, self._stream, request)

    async def _around(self, sequence: int) -> _Window:
        window = self._known(sequence)
        while window is None:
            if self._reading is None:
                self._reading = asyncio.create_task(self._read_from(sequence))
            # Shielded, since others wait for it too.
            window = await asyncio.shield(self._reading)
            if not window.covers(sequence):
                window = self._known(sequence)
        return window

    def _known(self, sequence: int) -> _Window | None:
        oldest = time.monotonic() - _FRESH_SECONDS
        return next((each for each in self._windows if each.covers(sequence) and each.read_at > oldest), None)

    async def _read_from(self, sequence: int) -> _Window:
        try:
            request = {"seq": sequence, "next_by_subj": _ALL, "batch": _BATCH, "max_bytes": _BYTES}
            window = _Window(sequence, await self._get(request), time.monotonic())
            self._windows.appendleft(window)
            asyncio.get_running_loop().call_later(_FRESH_SECONDS, self._forget)
            return window
        finally:
            self._reading = None

    def _forget(self) -> None:
        """Hold nothing that isn't given any more."""
        oldest = time.monotonic() - _FRESH_SECONDS
        while self._windows and self._windows[-1].read_at <= oldest:
            self._windows.pop()

    async def _last(self, subject: str) -> StoredMessage | None:
        loop = asyncio.get_running_loop()
        if (asked := self._asked.get(subject)) is None:
            if not self._asked:
                loop.call_later(_GATHERING_SECONDS, self._answer)
            asked = self._asked[subject] = loop.create_future()
        return await asyncio.shield(asked)

    def _answer(self) -> None:
        asked, self._asked = list(self._asked.items()), {}
        for start in range(0, len(asked), _SUBJECTS):
            task = asyncio.create_task(self._answer_some(dict(asked[start : start + _SUBJECTS])))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _answer_some(self, asked: Mapping[str, asyncio.Future[StoredMessage | None]]) -> None:
        try:
            found = {each.subject: each for each in await self._get({"multi_last": list(asked)})}
        except BaseException as error:
            for waiting in asked.values():
                # Whoever waits may have gone.
                if not waiting.done():
                    waiting.set_exception(error)
                    waiting.exception()
            if not isinstance(error, Exception):
                raise
            return
        for subject, waiting in asked.items():
            if not waiting.done():
                waiting.set_result(found.get(subject))

    async def _get(self, request: Mapping[str, Any]) -> list[StoredMessage]:
        from nats import errors as nats_errors

        subject = f"$JS.API.DIRECT.GET.{self._stream}"
        client, timeout = cast("JetStreamClient", self._connection.client), self._connection.timeout
        try:
            async with asyncio.timeout(timeout):
                *answers, (last_words, _) = await client.answers(subject, json.dumps(request).encode(), _ends)
        except TimeoutError:
            raise DeadlineError(f"not all answers on {subject} within {timeout:g} s") from None
        except nats_errors.Error as error:
            raise UnreachableError(f"the connection failed while asking {subject}: {error}") from None
        if last_words[STATUS] not in (b"204", b"404"):
            told = last_words.split(b"\r\n", 1)[0].decode(errors="replace")
            raise UnreachableError(f"expected messages of {self._stream}, found {told!r}: its server may be away")
        messages = [message for header, body in answers if (message := stored_message(header, body))]
        if len(messages) < len(answers):
            raise UnreachableError(f"expected messages of {self._stream}, found answers that name none")
        return messages


async def _one(connection: Connection, stream: str, request: Mapping[str, Any]) -> StoredMessage | None:
    """Read one message as it is now."""
    match request:
        case {"seq": sequence, "next_by_subj": subject}:
            return await next_message(connection, stream, sequence, subject)
        case {"seq": sequence}:
            return await get_message(connection, stream, sequence)
    return await last_message(connection, stream, request["last_by_subj"])


def _ends(header: bytes) -> bool:
    # A message may itself have been stored with a status in its first line.
    return _TOLD_SEQUENCE not in header
