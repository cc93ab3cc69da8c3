"""Requests whose confirmations call a function, many at a time: one write for all of them, and one inbox.

A request of the connection costs a future, a timer and a task of its own; a worker sends two of them for each job.
"""

from __future__ import annotations

import logging
from operator import itemgetter
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

from airflow_provider_jetstream.jetstream.client.answer_run import AnswerRun
from airflow_provider_jetstream.jetstream.client.frame_encoder import encode_requests
from airflow_provider_jetstream.jetstream.client.wire_text import decode_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection, Subscription
    from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError

log = logging.getLogger("jetstream.worker")


class Requested(Protocol):
    """Something for which a request is sent.

    :ivar request: the number of its request
    """

    request: int


_Item = TypeVar("_Item", bound=Requested)


class Confirmations(Generic[_Item]):
    """Sends a request for each of some items, and hands on what is confirmed; has no time limits of its own.

    :param confirms: returns whether all of some answers are confirmations
    :param on_confirmed: takes items whose requests are confirmed
    :param on_refused: takes an item whose request is answered in another way, or denied
    """

    def __init__(
        self,
        connection: Connection,
        confirms: Callable[[Sequence[bytes]], bool],
        on_confirmed: Callable[[Sequence[_Item]], None],
        on_refused: Callable[[_Item], None],
    ) -> None:
        self._connection = connection
        self._confirms = confirms
        self._on_confirmed = on_confirmed
        self._on_refused = on_refused
        inbox = connection.new_inbox()
        self._prefix = f"{inbox}.".encode()
        self._filter = f"{inbox}.*"
        self._subscription: Subscription | None = None
        self._next = 1
        # By number as the answer's subject has it.
        self._open: dict[int, _Item] = {}
        self._subjects: dict[int, bytes] = {}

    async def __aenter__(self) -> Self:
        run = AnswerRun(self._prefix, self._on_answers)
        self._subscription = await self._connection.subscribe_raw(self._filter, self._on_message, self._on_denied, run)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._subscription:
            await self._subscription.unsubscribe()

    def request(
        self,
        items: Sequence[_Item],
        subjects: Sequence[bytes],
        payloads: Sequence[bytes],
        headers: Sequence[bytes] | None = None,
    ) -> None:
        """Send a request for each item.

        :param headers: encoded; ``None`` where no request has any
        :raises UnreachableError: the connection is lost; nothing is sent, now or later
        """
        first, self._next = self._next, self._next + len(items)
        numbers = range(first, self._next)
        self._connection.write(encode_requests(subjects, self._prefix, first, payloads, headers), len(items))
        for number, item in zip(numbers, items, strict=True):
            item.request = number
        self._open.update(zip(numbers, items, strict=True))
        self._subjects.update(zip(numbers, subjects, strict=True))

    def forget(self, item: _Item) -> None:
        """Hand on nothing any more for the request of an item."""
        self._take(item.request)

    def _take(self, number: int) -> _Item | None:
        self._subjects.pop(number, None)
        return self._open.pop(number, None)

    def _on_message(self, subject: bytes, _: bytes, headers: bytes | None, payload: bytes) -> None:
        number = subject[len(self._prefix) :]
        if number.isdigit() and (item := self._take(int(number))):
            if headers is None and self._confirms([payload]):
                self._on_confirmed([item])
            else:
                self._on_refused(item)

    def _on_answers(self, answers: Sequence[tuple[bytes, bytes]]) -> None:
        try:
            self._take_answers(answers)
        except Exception:
            # Their requests are sent again after a while.
            log.exception("%d answers can't be taken", len(answers))

    def _take_answers(self, answers: Sequence[tuple[bytes, bytes]]) -> None:
        if not self._confirms([*map(itemgetter(1), answers)]):
            for number, body in answers:
                self._on_message(self._prefix + number, b"", None, body)
            return
        found = [item for number, _ in answers if (item := self._take(int(number))) is not None]
        self._on_confirmed(found)

    def _on_denied(self, denial: PermissionDeniedError) -> None:
        is_inbox = denial.subject == self._filter
        for number, subject in list(self._subjects.items()):
            answered_on = self._prefix + b"%d" % number
            if (is_inbox or denial.subject in (decode_text(subject), decode_text(answered_on))) and (
                item := self._take(number)
            ):
                self._on_refused(item)
