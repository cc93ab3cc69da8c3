"""Requests whose confirmations call a function: written with all else of the loop's turn, with one inbox for all.

A request of the connection costs a future, a timer and a task of its own; a worker sends two of them for each job.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Self

from airflow_provider_jetstream.jetstream.client.answer_run import AnswerRun
from airflow_provider_jetstream.jetstream.client.frame_encoder import encode_message
from airflow_provider_jetstream.jetstream.client.wire_text import decode_text
from airflow_provider_jetstream.jetstream.errors import UnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from airflow_provider_jetstream.jetstream.client.connection import Connection, Subscription
    from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError

    # Takes headers and body of the answer; no body where the request was denied.
    OnAnswer: TypeAlias = Callable[[bytes | None, bytes | None], None]

log = logging.getLogger("jetstream.worker")


class Confirmations:
    """Sends requests and calls a function with each answer; has no time limits of its own."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        inbox = connection.new_inbox()
        self._prefix = f"{inbox}.".encode()
        self._filter = f"{inbox}.*"
        self._subscription: Subscription | None = None
        self._number = 0
        # By number as the answer's subject has it: the request's subject, and what takes the answer.
        self._open: dict[bytes, tuple[bytes, OnAnswer]] = {}
        self._frames: list[bytes] = []
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> Self:
        run = AnswerRun(self._prefix, self._on_answers)
        self._subscription = await self._connection.subscribe_raw(self._filter, self._on_message, self._on_denied, run)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._subscription:
            await self._subscription.unsubscribe()

    def request(self, subject: bytes, payload: bytes, on_answer: OnAnswer, headers: bytes = b"") -> bytes:
        """Send a request at the end of this turn of the event loop, and return its number for :meth:`forget`.

        A connection that is lost before that sends nothing, now or later, and no answer comes.

        :param headers: encoded; empty where it has none
        :raises UnreachableError: the connection is lost; nothing is sent, now or later
        """
        if not self._connection.is_connected:
            raise UnreachableError(f"the connection is lost: nothing was sent on {decode_text(subject)}")
        self._number += 1
        number = b"%d" % self._number
        if not self._frames:
            self._loop.call_soon(self._write)
        self._frames.append(encode_message(subject, payload, headers, self._prefix + number))
        self._open[number] = (subject, on_answer)
        return number

    def forget(self, number: bytes) -> None:
        """Call nothing any more for a request."""
        self._open.pop(number, None)

    def _write(self) -> None:
        frames, self._frames = self._frames, []
        try:
            self._connection.write(b"".join(frames), len(frames))
        except UnreachableError as error:
            log.debug("%d requests weren't sent: %s", len(frames), error)

    def _on_message(self, subject: bytes, _: bytes, headers: bytes | None, payload: bytes) -> None:
        if found := self._open.pop(subject[len(self._prefix) :], None):
            found[1](headers, payload)

    def _on_answers(self, answers: list[tuple[bytes, bytes]]) -> None:
        take = self._open.pop
        for number, body in answers:
            if found := take(number, None):
                try:
                    found[1](None, body)
                except Exception:
                    log.exception("an answer on %s can't be taken", decode_text(found[0]))

    def _on_denied(self, denial: PermissionDeniedError) -> None:
        is_inbox = denial.subject == self._filter
        for number, (subject, on_answer) in list(self._open.items()):
            if is_inbox or denial.subject in (decode_text(subject), decode_text(self._prefix + number)):
                del self._open[number]
                on_answer(None, None)
