"""Reading single messages of a stream, and many of them ahead of those who will ask for each."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from base64 import b64decode
from typing import TYPE_CHECKING, Any, Final, NoReturn

from airflow_provider_jetstream.jetstream.client.blocking.requests import Request, RequestMany, RequestStream
from airflow_provider_jetstream.jetstream.client.diagnostics import decode_answer
from airflow_provider_jetstream.jetstream.client.direct_get import STATUS, stored_message
from airflow_provider_jetstream.jetstream.client.message import StoredMessage, message_of, parse_headers
from airflow_provider_jetstream.jetstream.client.stream_api import NO_MESSAGE, not_found
from airflow_provider_jetstream.jetstream.errors import ApiError, UnreachableError, WireError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


# As many as are on their way everywhere: the server drops its whole queue of API requests at ten thousand.
WIDEST: Final = 256


class MessageReader(ABC):
    """Reads messages of a stream.

    :param subject: where they are asked for
    """

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._known: dict[int | str, StoredMessage | None] = {}

    @abstractmethod
    def read(self, header: bytes, body: bytes) -> StoredMessage | None:
        """Read an answer.

        :param header: its header
        :param body: its body
        :return: the message, if there is one
        """

    async def get(self, request: Mapping[str, Any]) -> StoredMessage | None:
        """Get one message.

        :param request: as the API takes it
        :return: the message, if there is one
        """
        if len(request) == 1:
            (key,) = request.values()
            if key in self._known:
                return self._known[key]
        return self.read(*await Request(self._subject, _written(request)))

    async def prefetch(self, sequences: Sequence[int], subjects: Sequence[str]) -> None:
        """Get what will be asked for, until :meth:`forget`.

        :param sequences: of messages, in order
        :param subjects: whose last messages will be asked for
        """
        self._known.update(dict.fromkeys((*sequences, *subjects)))
        if subjects:
            self._known.update({found.subject: found for found in await self.last_of(subjects)})
        if sequences:
            self._known.update({found.sequence: found for found in await self.all_of(sequences)})

    def forget(self) -> None:
        """Ask anew from now on."""
        self._known.clear()

    async def all_of(self, sequences: Sequence[int]) -> Iterable[StoredMessage]:
        """Get messages by their sequences.

        :param sequences: in order
        :return: those that are stored
        """
        return await self._each([{"seq": each} for each in sequences])

    async def last_of(self, subjects: Sequence[str]) -> Iterable[StoredMessage]:
        """Get the last messages of subjects.

        :param subjects: the subjects
        :return: those that there are
        """
        return await self._each([{"last_by_subj": each} for each in subjects])

    async def _each(self, requests: Sequence[Mapping[str, Any]]) -> list[StoredMessage]:
        found: list[StoredMessage] = []
        for start in range(0, len(requests), WIDEST):
            asked = [(self._subject, _written(request)) for request in requests[start : start + WIDEST]]
            found += [message for answer in await RequestMany(asked) if (message := self.read(*answer))]
        return found


def _written(request: Mapping[str, Any]) -> bytes:
    # By far the most frequent ones by hand, at a third of the price.
    if len(request) == 1 and (sequence := request.get("seq")) is not None:
        return b'{"seq":%d}' % sequence
    return json.dumps(request).encode()


_NOBODY = b"NATS/1.0 503"
# As the server writes an answer; what is written otherwise is read as the JSON that it is.
_ANSWER = re.compile(
    rb'\{"type":"io\.nats\.jetstream\.api\.v1\.stream_msg_get_response","message":\{"subject":"([^"\\]*)","seq":(\d+),'
    rb'(?:"hdrs":"([^"\\]*)",)?(?:"data":"([^"\\]*)",)?"time":"([^"\\]*)"\}\}'
)


class ApiReader(MessageReader):
    """Gets from a stream by the API.

    :param stream: its name
    """

    def __init__(self, stream: str) -> None:
        super().__init__(f"$JS.API.STREAM.MSG.GET.{stream}")
        self._stream = stream

    def read(self, header: bytes, body: bytes) -> StoredMessage | None:
        """Read an answer.

        :param header: its header
        :param body: its body
        :return: the message, if there is one
        :raises NotFoundError: the stream doesn't exist
        :raises UnreachableError: nobody serves it just now
        """
        if told := _ANSWER.fullmatch(body):
            subject, sequence, pairs, data, time = told.groups()
            headers = parse_headers(b64decode(pairs)) if pairs else ()
            return StoredMessage(subject.decode(), int(sequence), time.decode(), headers, b64decode(data or b""))
        if header.startswith(_NOBODY):
            raise UnreachableError(
                f"nobody answers on {self._subject}: the stream or JetStream itself is away; try again"
            )
        try:
            return message_of(decode_answer(body, self._subject.removeprefix("$JS.API.")))
        except ApiError as error:
            if error.err_code == NO_MESSAGE:
                return None
            raise not_found(error, f"stream {self._stream}") from None


NOBODY: Final = b"NATS/1.0 503"

_NO_MESSAGE = b"NATS/1.0 404"
_END = b"NATS/1.0 204"
_MOST_BYTES = 4 << 20
# Of at most so many sequences one is wanted, where it pays to take what lies between.
_SPARSE = 2


class DirectReader(MessageReader):
    """Direct gets from a stream whose every answer is as exact as the API's.

    :param stream: its name
    :param batches: whether the server gives many messages for one request
    """

    def __init__(self, stream: str, *, batches: bool) -> None:
        super().__init__(f"$JS.API.DIRECT.GET.{stream}")
        self._stream = stream
        self._batches = batches

    def read(self, header: bytes, body: bytes) -> StoredMessage | None:
        """Read an answer.

        :param header: its header
        :param body: its body
        :return: the message, if there is one
        :raises UnreachableError: nobody serves the stream just now
        """
        if header.startswith(b"NATS/1.0\r\n"):
            return _message(header, body)
        if not header.startswith(_NO_MESSAGE):
            self._refuse(header)
        return None

    async def run(self, start: int, subject: str) -> list[StoredMessage]:
        """Get messages in a row.

        :param start: the first sequence to consider
        :param subject: a filter
        :return: messages in order; nothing where there are no more
        """
        return await self._many({"seq": start, "next_by_subj": subject})

    async def all_of(self, sequences: Sequence[int]) -> Iterable[StoredMessage]:
        """Get messages by their sequences.

        :param sequences: in order
        :return: those that are stored
        """
        start, stop = sequences[0], sequences[-1]
        if not self._batches or stop - start >= _SPARSE * len(sequences):
            return await super().all_of(sequences)
        wanted, found = set(sequences), []
        while start <= stop and (run := await self._many({"seq": start, "next_by_subj": ">"}, stop - start + 1)):
            found += [each for each in run if each.sequence in wanted]
            start = run[-1].sequence + 1
        return found

    async def last_of(self, subjects: Sequence[str]) -> Iterable[StoredMessage]:
        """Get the last messages of subjects.

        :param subjects: the subjects
        :return: those that there are
        """
        if not self._batches:
            return await super().last_of(subjects)
        found: list[StoredMessage] = []
        for start in range(0, len(subjects), WIDEST):
            part = subjects[start : start + WIDEST]
            while part and (last := await self._many({"multi_last": part})):
                found += last
                # An answer is cut where it becomes too large.
                told = {each.subject for each in last}
                part = [each for each in part if each not in told] if len(last) < len(part) else []
        return found

    async def _many(self, request: Mapping[str, Any], most: int = WIDEST) -> list[StoredMessage]:
        asked = {**request, "batch": min(most, WIDEST), "max_bytes": _MOST_BYTES}
        *messages, end = await RequestStream(self._subject, json.dumps(asked).encode())
        if not end[0].startswith((_END, _NO_MESSAGE)):
            self._refuse(end[0])
        return [_message(header, body) for header, body in messages]

    def _refuse(self, header: bytes) -> NoReturn:
        if header.startswith(NOBODY):
            raise UnreachableError(
                f"nobody answers on {self._subject}: {self._stream} is away, or takes no direct gets any more"
            )
        raise ApiError(int(header[STATUS]), 0, header.decode(errors="replace").strip(), self._subject)


def _message(header: bytes, body: bytes) -> StoredMessage:
    if message := stored_message(header, body):
        return message
    raise WireError(f"expected an answer to a direct get, found the headers {header[:200]!r}")
