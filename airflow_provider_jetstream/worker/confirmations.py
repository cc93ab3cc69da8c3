"""Requests whose confirmations call a function, many at a time: one write for all of them, and one inbox.

A request of the connection costs a future, a timer and a task of its own; a worker sends two of them for each job.
"""

from __future__ import annotations

import logging
from itertools import repeat
from typing import TYPE_CHECKING, Final, Generic, Self, TypeVar

from airflow_provider_jetstream.jetstream.client.wire import AnswerForm, encode_requests
from airflow_provider_jetstream.jetstream.client.wire_text import decode_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection, Subscription
    from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError

log = logging.getLogger("jetstream.worker")

# More than any number of a request has, and few enough for int().
_MOST_DIGITS: Final = 18


_Item = TypeVar("_Item")


class Confirmations(Generic[_Item]):
    """Sends a request for each of some items, and hands on what is confirmed; has no time limits of its own.

    :param confirms: returns whether all of some answers are confirmations
    :param on_confirmed: takes items whose requests are confirmed, at least one
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
        # By number as the answer's subject has it: the item, and the subject of its request.
        self._open: dict[int, tuple[_Item, bytes]] = {}

    async def __aenter__(self) -> Self:
        form = AnswerForm(self._prefix, self._on_answers)
        self._subscription = await self._connection.subscribe_raw(self._filter, self._on_message, self._on_denied, form)
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
    ) -> range:
        """Send a request for each item, and return the numbers of the requests.

        :param headers: encoded; ``None`` where no request has any
        :raises UnreachableError: the connection is lost; nothing is sent, now or later
        """
        first, self._next = self._next, self._next + len(items)
        numbers = range(first, self._next)
        self._connection.write(encode_requests(subjects, self._prefix, first, payloads, headers), len(items))
        self._open.update(zip(numbers, zip(items, subjects, strict=True), strict=True))
        return numbers

    def forget(self, number: int) -> None:
        """Hand on nothing any more for a request."""
        self._open.pop(number, None)

    def _on_message(self, subject: bytes, _: bytes, headers: bytes | None, payload: bytes) -> None:
        number = subject[len(self._prefix) :]
        if number.isdigit() and len(number) <= _MOST_DIGITS:
            self._on_answer(int(number), headers is None and self._confirms([payload]))

    def _on_answer(self, number: int, confirms: bool) -> None:  # noqa: FBT001
        if entry := self._open.pop(number, None):
            if confirms:
                self._on_confirmed([entry[0]])
            else:
                self._on_refused(entry[0])

    def _on_answers(self, numbers: Sequence[int], bodies: Sequence[bytes]) -> None:
        try:
            if self._confirms(bodies):
                # An answer may come after its request was forgotten, and sent again.
                if items := [entry[0] for entry in map(self._open.pop, numbers, repeat(None)) if entry]:
                    self._on_confirmed(items)
            else:
                for number, body in zip(numbers, bodies, strict=True):
                    self._on_answer(number, self._confirms([body]))
        except Exception:
            # Their requests are sent again after a while.
            log.exception("%d answers can't be taken", len(numbers))

    def _on_denied(self, denial: PermissionDeniedError) -> None:
        is_inbox = denial.subject == self._filter
        for number, (_, subject) in list(self._open.items()):
            answered_on = self._prefix + b"%d" % number
            if is_inbox or denial.subject in (decode_text(subject), decode_text(answered_on)):
                self._on_answer(number, confirms=False)
