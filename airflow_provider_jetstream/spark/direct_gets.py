"""Direct gets from one stream: single ones, and many messages for one request where the server knows how."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NoReturn

from airflow_provider_jetstream.jetstream.direct_get import STATUS, stored_message
from airflow_provider_jetstream.jetstream.errors import ApiError, UnreachableError
from airflow_provider_jetstream.spark.asking import AskAll
from airflow_provider_jetstream.spark.errors import WireError
from airflow_provider_jetstream.spark.gets import WIDEST, Gets

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.stored import StoredMessage

NOBODY: Final = b"NATS/1.0 503"

_NO_MESSAGE = b"NATS/1.0 404"
_END = b"NATS/1.0 204"
_MOST_BYTES = 4 << 20
# Of at most so many sequences one is wanted, where it pays to take what lies between.
_SPARSE = 2


class DirectGets(Gets):
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
        *messages, end = await AskAll(self._subject, json.dumps(asked).encode())
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
