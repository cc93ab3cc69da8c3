"""The answers to many requests of one connection: one inbox for all of them, and a number for each.

A group of requests is written at once and answered in any order. nats-py's own requests need a future, a random name
and a task for each.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.client.diagnostics import last_report
from airflow_provider_jetstream.jetstream.client.headers import encode_headers
from airflow_provider_jetstream.jetstream.client.streams import NO_RESPONDERS
from airflow_provider_jetstream.jetstream.client.unsent import changes_state, is_read
from airflow_provider_jetstream.jetstream.client.wire import AnswerForm, encode_message, encode_subject
from airflow_provider_jetstream.jetstream.errors import (
    DeadlineError,
    PermissionDeniedError,
    TransientError,
    UnreachableError,
    WireError,
    same_error,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from airflow_provider_jetstream.jetstream.client.connection import Connection, Subscription

    _Answer: TypeAlias = bytes | TransientError | PermissionDeniedError

# The server drops its whole queue of API requests at ten thousand, those of other clients included.
MOST_IN_FLIGHT: Final = 1_000
_MOST_BYTES: Final = 2 << 20
_MOST_DIGITS: Final = 18


class _RequestGroup:
    """Requests that are written together.

    :ivar missing: by number, the position of each request that has no answer yet
    :ivar answers: by position, what has come
    """

    __slots__ = ("answers", "done", "limit", "missing", "requests", "stores")

    def __init__(self, requests: Sequence[tuple[str, bytes]], *, stores: bool, limit: float) -> None:
        self.requests = requests
        self.limit = limit
        self.stores = stores
        self.missing: dict[int, int] = {}
        self.answers: dict[int, _Answer] = {}
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def settle(self, number: int, answer: _Answer) -> None:
        if (position := self.missing.pop(number, None)) is not None:
            self.answers[position] = answer
            if not self.missing and not self.done.done():
                self.done.set_result(None)

    def subject(self, number: int) -> str:
        return self.requests[self.missing[number]][0]


class AnswerInbox:
    """Sends groups of requests with at most :data:`MOST_IN_FLIGHT` unanswered ones.

    :param connection: has an event loop
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._opening = asyncio.Lock()
        self._subscription: Subscription | None = None
        self._is_denied = False
        self._prefix = b""
        self._number = 0
        # By number: the group of each request that has no answer yet.
        self._groups: dict[int, _RequestGroup] = {}
        self._room = asyncio.Event()

    async def request_many(
        self, requests: Sequence[tuple[str, bytes]], headers: Sequence[dict[str, str]] | None = None
    ) -> list[bytes | TransientError]:
        """Send requests and return for each the body of its answer, or why there is none.

        :param headers: one for each request, where the requests are messages to be stored
        :raises PermissionDeniedError: the user may not send one of them, or not receive the answers
        """
        answers: list[bytes | TransientError] = []
        while len(answers) < len(requests):
            answers += await self._request_some(requests, headers, len(answers))
        return answers

    async def request(self, subject: str, payload: bytes, limit: float, headers: dict[str, str] | None = None) -> bytes:
        """Send one request and return the body of its answer, whatever else is in flight.

        :param limit: seconds
        :param headers: where the request is a message to be stored
        :raises TransientError: no answer, or nobody answers
        :raises PermissionDeniedError: the user may not send it, or not receive the answer
        """
        await self._open()
        group = _RequestGroup([(subject, payload)], stores=headers is not None, limit=limit)
        self._write(group, None if headers is None else [headers], 0, 1)
        await self._settled(group)
        answer = _result(group.answers[0])
        if isinstance(answer, bytes):
            return answer
        raise answer

    def repeat_reads(self) -> None:
        """Send again what only reads and isn't answered yet: after a loss of the connection no answer comes any more.

        The answer is as of a later moment, which is as good for whoever asked. What changes something isn't repeated:
        whether the server has received it isn't known.
        """
        frames = []
        for number, group in self._groups.items():
            subject, payload = group.requests[group.missing[number]]
            if not group.stores and is_read(subject):
                frames.append(encode_message(encode_subject(subject), payload, b"", b"%b%d" % (self._prefix, number)))
        if frames:
            self._connection.write(b"".join(frames), len(frames))

    async def _request_some(
        self, requests: Sequence[tuple[str, bytes]], headers: Sequence[dict[str, str]] | None, start: int
    ) -> list[bytes | TransientError]:
        """Send the next requests together, and return their answers."""
        limit = await self._wait_until_connected()
        if limit <= 0:
            reason = f"the connection is lost for {self._connection.timeout:g} s already, so nothing was sent"
            lost = reason + last_report(self._connection.last_error)
            return [UnreachableError(f"{lost} on {subject}") for subject, _ in requests[start : start + MOST_IN_FLIGHT]]
        try:
            await self._open()
        except UnreachableError as error:
            return [UnreachableError(str(error)) for _ in requests[start:]]
        while len(self._groups) >= MOST_IN_FLIGHT:
            self._room.clear()
            await self._room.wait()
        group = _RequestGroup(requests, stores=headers is not None, limit=limit)
        end = self._write(group, headers, start, MOST_IN_FLIGHT - len(self._groups))
        await self._settled(group)
        return [_result(group.answers[position]) for position in range(start, end)]

    async def _settled(self, group: _RequestGroup) -> None:
        """Wait until each request of a group has an answer, or its time limit has passed."""
        try:
            if group.missing:
                async with asyncio.timeout(group.limit):
                    await group.done
        except TimeoutError:
            await self._expire(group)
        finally:
            for number in group.missing:
                del self._groups[number]
            self._room.set()

    async def _wait_until_connected(self) -> float:
        """Wait for a lost connection, and return the seconds that are left of the time limit."""
        connection, began = self._connection, time.monotonic()
        if connection.is_connected or connection.is_closed:
            return connection.timeout
        if not (await connection.wait_until_connected(connection.timeout) or connection.is_closed):
            return 0.0
        return max(0.001, began + connection.timeout - time.monotonic())

    async def _open(self) -> None:
        if self._subscription and not self._is_denied:
            return
        async with self._opening:
            if self._is_denied and self._subscription:
                # The permissions may have changed since.
                await self._subscription.unsubscribe()
                self._subscription = None
            if self._subscription is None:
                inbox, self._is_denied = self._connection.new_inbox(), False
                self._prefix = f"{inbox}.".encode()
                self._subscription = await self._connection.subscribe_raw(
                    f"{inbox}.*", self._on_answer, self._on_denied, AnswerForm(self._prefix, self._on_answers)
                )

    def _write(self, group: _RequestGroup, headers: Sequence[dict[str, str]] | None, start: int, most: int) -> int:
        """Write requests up to a limit, and return the position after the last one."""
        requests, limit = group.requests, self._connection.max_payload
        end, position = min(len(requests), start + most), start
        frames: list[bytes] = []
        size, numbers = 0, {}
        while position < end and size <= _MOST_BYTES:
            subject, payload = requests[position]
            block = encode_headers(headers[position]) if headers and headers[position] else b""
            self._number += 1
            try:
                reply = b"%b%d" % (self._prefix, self._number)
                frame = encode_message(encode_subject(subject), payload, block, reply)
            except WireError as error:
                group.answers[position] = UnreachableError(f"nothing was sent on {subject}: {error}")
            else:
                if (bytes_sent := len(block) + len(payload)) > limit:
                    problem = f"it has {bytes_sent} bytes, more than the server's limit of {limit}"
                    group.answers[position] = UnreachableError(f"nothing was sent on {subject}: {problem}")
                else:
                    frames.append(frame)
                    size += len(frame)
                    numbers[self._number] = position
            position += 1
        if frames:
            try:
                self._connection.write(b"".join(frames), len(frames))
            except UnreachableError as error:
                for unsent in numbers.values():
                    group.answers[unsent] = UnreachableError(str(error))
            else:
                group.missing = numbers
                self._groups.update(dict.fromkeys(numbers, group))
        return position

    async def _expire(self, group: _RequestGroup) -> None:
        """Settle requests that aren't answered in time, so that none arrives later that would change something.

        :raises JetStreamProviderError: why the connection was closed for good, where the server is the reason
        """
        if self._connection.close_reason:
            raise same_error(self._connection.close_reason)
        changes, what = False, "acknowledgement" if group.stores else "answer"
        reported = last_report(self._connection.last_error)
        for number in list(group.missing):
            subject = group.subject(number)
            changes |= group.stores or changes_state(subject)
            self._settle(number, DeadlineError(f"no {what} on {subject} within {group.limit:.3g} s{reported}"))
        if changes:
            await self._connection.drop_unsent()

    def _settle(self, number: int, answer: _Answer) -> None:
        if group := self._groups.pop(number, None):
            group.settle(number, answer)
            self._room.set()

    def _on_answers(self, numbers: Sequence[int], bodies: Sequence[bytes]) -> None:
        for number, body in zip(numbers, bodies, strict=True):
            self._settle(number, body)

    def _on_answer(self, subject: bytes, _: bytes, headers: bytes | None, payload: bytes) -> None:
        number = subject[len(self._prefix) :]
        if not number.isdigit() or len(number) > _MOST_DIGITS or (group := self._groups.get(int(number))) is None:
            return
        if headers and headers.startswith(NO_RESPONDERS):
            target = group.subject(int(number))
            self._settle(int(number), UnreachableError(nobody_answers(target, stores=group.stores)))
        else:
            self._settle(int(number), payload)

    def _on_denied(self, denial: PermissionDeniedError) -> None:
        prefix = self._prefix.decode()
        if denial.subject == f"{prefix}*":
            self._is_denied = True
            for number in list(self._groups):
                self._settle(number, _own(denial, "on which answers would arrive"))
        elif denial.action == "publish":
            for number, group in list(self._groups.items()):
                if denial.subject in (group.subject(number), f"{prefix}{number}"):
                    self._settle(number, _own(denial))


def nobody_answers(subject: str, *, stores: bool) -> str:
    """Return the text of the error for a request that nobody answers.

    :param stores: whether the request is a message to be stored
    """
    if stores:
        return f"no stream captures {subject} just now"
    return f"nobody answers on {subject}: the stream, the consumer or JetStream itself is away; try again"


def _own(denial: PermissionDeniedError, purpose: str = "") -> PermissionDeniedError:
    return denial.again(purpose)


def _result(answer: _Answer) -> bytes | TransientError:
    if isinstance(answer, PermissionDeniedError):
        raise answer
    return answer
