"""Reading single messages of a stream, and many of them ahead of those who will ask for each."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.spark.asking import Ask, AskEach

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.stored import StoredMessage

# As many as are on their way everywhere: the server drops its whole queue of API requests at ten thousand.
WIDEST: Final = 256


class Gets(ABC):
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
        return self.read(*await Ask(self._subject, _written(request)))

    async def foresee(self, sequences: Sequence[int], subjects: Sequence[str]) -> None:
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
            found += [message for answer in await AskEach(asked) if (message := self.read(*answer))]
        return found


def _written(request: Mapping[str, Any]) -> bytes:
    # By far the most frequent ones by hand, at a third of the price.
    if len(request) == 1 and (sequence := request.get("seq")) is not None:
        return b'{"seq":%d}' % sequence
    return json.dumps(request).encode()
