"""Reads messages of one stream over a blocking connection: single ones, many at once, and ahead of their use."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.blocking.requests import Request, RequestMany
from airflow_provider_jetstream.jetstream.client.concurrency import MAX_CONCURRENT
from airflow_provider_jetstream.jetstream.client.direct_get import (
    NO_RESPONDERS,
    get_last_messages,
    get_limited_batch,
    refuse,
    with_exact_subject,
)
from airflow_provider_jetstream.jetstream.client.message import parse_direct_get, parse_msg_get
from airflow_provider_jetstream.jetstream.errors import UnreachableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage

_NOT_STORED = b"NATS/1.0 404"
_MESSAGE = b"NATS/1.0\r\n"
# A range is read as a whole where at least one of so many of its sequences is wanted.
_SPARSE = 2


class StreamReader(ABC):
    """Reads messages of a stream by single requests.

    :param api: the subject of the requests after the API's prefix, without the stream
    """

    def __init__(self, connection: Connection, stream: str, api: str) -> None:
        self._connection = connection
        self._stream = stream
        self._subject = f"{connection.api_prefix}.{api}.{stream}"
        # Messages that were read ahead, by sequence or subject; ``None`` where none is stored.
        self.prefetched: dict[int | str, StoredMessage | None] = {}

    @abstractmethod
    def parse(self, header: bytes, body: bytes) -> StoredMessage | None:
        """Parse an answer; ``None`` where the message isn't stored."""

    async def get(self, request: Mapping[str, Any]) -> StoredMessage | None:
        """Read one message by a request as ``MSG.GET`` takes it."""
        if len(request) == 1:
            (key,) = request.values()
            if key in self.prefetched:
                return self.prefetched[key]
        message = self.parse(*await Request(self._subject, _encode(request)))
        return await with_exact_subject(self._connection, self._stream, message) if message else None

    async def prefetch(self, sequences: Sequence[int], subjects: Sequence[str]) -> None:
        """Read messages that :meth:`get` returns from then on, until :meth:`forget`.

        :param sequences: sequences of messages, in order
        :param subjects: subjects whose last messages are read
        """
        self.prefetched.update(dict.fromkeys((*sequences, *subjects)))
        if subjects:
            self.prefetched.update({message.subject: message for message in await self.get_last(subjects)})
        if sequences:
            self.prefetched.update({message.sequence: message for message in await self.get_many(sequences)})

    def forget(self) -> None:
        """Drop what was prefetched."""
        self.prefetched.clear()

    async def get_many(self, sequences: Sequence[int]) -> Iterable[StoredMessage]:
        """Read the messages of sequences, which are in order; omits those that aren't stored."""
        return await self._request_many([{"seq": sequence} for sequence in sequences])

    async def get_last(self, subjects: Sequence[str]) -> Iterable[StoredMessage]:
        """Read the last messages of subjects; omits subjects without messages."""
        return await self._request_many([{"last_by_subj": subject} for subject in subjects])

    async def _request_many(self, requests: Sequence[Mapping[str, Any]]) -> list[StoredMessage]:
        messages: list[StoredMessage] = []
        for start in range(0, len(requests), MAX_CONCURRENT):
            encoded = [(self._subject, _encode(request)) for request in requests[start : start + MAX_CONCURRENT]]
            messages += [message for answer in await RequestMany(encoded) if (message := self.parse(*answer))]
        return [await with_exact_subject(self._connection, self._stream, message) for message in messages]


class ApiReader(StreamReader):
    """Reads from the stream's leader by ``MSG.GET``."""

    def __init__(self, connection: Connection, stream: str) -> None:
        super().__init__(connection, stream, "STREAM.MSG.GET")

    def parse(self, header: bytes, body: bytes) -> StoredMessage | None:
        """Parse an answer; ``None`` where the message isn't stored.

        :raises NotFoundError: the stream doesn't exist
        :raises UnreachableError: nobody serves the stream just now
        """
        if header.startswith(NO_RESPONDERS):
            raise UnreachableError(
                f"nobody answers on {self._subject}: the stream or JetStream itself is away; try again"
            )
        return parse_msg_get(body, self._stream)


class DirectReader(StreamReader):
    """Reads by direct gets from a stream that answers them as exactly as the API.

    :param batches: whether the server supports batches of direct gets
    """

    def __init__(self, connection: Connection, stream: str, *, batches: bool) -> None:
        super().__init__(connection, stream, "DIRECT.GET")
        self._batches = batches

    def parse(self, header: bytes, body: bytes) -> StoredMessage | None:
        """Parse an answer; ``None`` where the message isn't stored.

        :raises UnreachableError: nobody serves the stream just now
        """
        if header.startswith(_MESSAGE):
            return parse_direct_get(header, body)
        if not header.startswith(_NOT_STORED):
            refuse(header, self._subject)
        return None

    async def get_run(self, start: int, subject: str) -> list[StoredMessage]:
        """Read the next messages from a sequence on whose subjects match a filter, in order; empty at the end."""
        return await self._get_batch({"seq": start, "next_by_subj": subject})

    async def get_many(self, sequences: Sequence[int]) -> Iterable[StoredMessage]:
        """Read the messages of sequences, which are in order; omits those that aren't stored."""
        start, stop = sequences[0], sequences[-1]
        if not self._batches or stop - start >= _SPARSE * len(sequences):
            return await super().get_many(sequences)
        wanted, messages = set(sequences), []
        while start <= stop and (run := await self._get_batch({"seq": start, "next_by_subj": ">"}, stop - start + 1)):
            messages += [message for message in run if message.sequence in wanted]
            start = run[-1].sequence + 1
        return messages

    async def get_last(self, subjects: Sequence[str]) -> Iterable[StoredMessage]:
        """Read the last messages of subjects; omits subjects without messages."""
        if not self._batches:
            return await super().get_last(subjects)
        return await get_last_messages(self._connection, self._stream, subjects)

    async def _get_batch(self, request: Mapping[str, Any], count: int = MAX_CONCURRENT) -> list[StoredMessage]:
        return await get_limited_batch(self._connection, self._stream, request, count)


def _encode(request: Mapping[str, Any]) -> bytes:
    # By far the most frequent request, at a third of the cost of json.dumps.
    if len(request) == 1 and (sequence := request.get("seq")) is not None:
        return b'{"seq":%d}' % sequence
    return json.dumps(request).encode()
