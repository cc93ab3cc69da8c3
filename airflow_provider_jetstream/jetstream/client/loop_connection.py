"""Requests and their answers over a connection on an event loop, whatever carries the frames.

All requests of a connection have one inbox, and a number each. A group of requests is written at once and answered in
any order. While the connection is lost, a request waits for it. What only reads is sent again after a loss, and nothing
that changes something is sent after its time limit.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.client.connection import Connection, is_only_answer
from airflow_provider_jetstream.jetstream.client.diagnostics import last_report
from airflow_provider_jetstream.jetstream.client.headers import NO_RESPONDERS, encode_headers
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
    from collections.abc import AsyncIterator, Callable, Sequence
    from typing import TypeAlias

    from airflow_provider_jetstream.jetstream.client.connection import RawMessage, Subscription
    from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError

    _Answer: TypeAlias = bytes | TransientError | PermissionDeniedError

# The server drops its whole queue of API requests at ten thousand, those of other clients included.
MOST_IN_FLIGHT: Final = 1_000
_MOST_BYTES: Final = 2 << 20
_MOST_DIGITS: Final = 18
_FAILED: Final = "the connection failed during a request on"
_UNSENT: Final = "nothing was sent on"


class _RequestGroup:
    """Requests that are written together.

    :param is_last: of a single request with many answers, what tells the last one by its headers
    :ivar missing: by number, the position of each request that has no answer yet
    :ivar answers: by position, what has come
    :ivar parts: what has come of many answers to one request
    """

    __slots__ = ("answers", "done", "is_last", "limit", "missing", "parts", "requests", "stores")

    def __init__(
        self,
        requests: Sequence[tuple[str, bytes]],
        *,
        stores: bool,
        limit: float,
        is_last: Callable[[bytes], bool] | None = None,
    ) -> None:
        self.requests = requests
        self.limit = limit
        self.stores = stores
        self.is_last = is_last
        self.parts: list[RawMessage] = []
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


class LoopConnection(Connection):
    """A connection on an event loop: what is common to all of them, whatever carries the frames that they write.

    At most :data:`MOST_IN_FLIGHT` of many requests are unanswered.
    """

    def __init__(self) -> None:
        self._opening = asyncio.Lock()
        self._inbox: Subscription | None = None
        self._is_inbox_denied = False
        self._answers_to = b""
        self._requests = 0
        # How many were sent, which numbers them; and by number the group of each that has no answer yet.
        self._groups: dict[int, _RequestGroup] = {}
        self._room = asyncio.Event()

    @property
    def loss(self) -> JetStreamProviderError:
        """Why the connection isn't there."""
        return self.close_reason or UnreachableError("the connection is lost")

    async def request(self, subject: str, payload: bytes = b"", *, time_limit: float | None = None) -> bytes:
        """Send a request and return the body of its one answer."""
        return (await self._answer(subject, payload, time_limit))[0]

    async def ask(
        self,
        subject: str,
        payload: bytes = b"",
        is_last: Callable[[bytes], bool] = is_only_answer,
        *,
        time_limit: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> list[RawMessage]:
        """Send a request and return all of its answers.

        :param time_limit: seconds; the connection's own where absent
        :param headers: where the request is a message with headers
        """
        return (await self._answer(subject, payload, time_limit, headers, is_last))[1]

    async def publish_acknowledged(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None, *, time_limit: float | None = None
    ) -> bytes:
        """Publish a message and return the answer of the stream that captures it."""
        return (await self._answer(subject, payload, time_limit, headers or {}))[0]

    async def request_many(
        self, requests: Sequence[tuple[str, bytes]], headers: Sequence[dict[str, str]] | None = None
    ) -> list[bytes | TransientError]:
        """Send many requests together."""
        answers: list[bytes | TransientError] = []
        while len(answers) < len(requests):
            answers += await self._request_some(requests, headers, len(answers))
        return answers

    async def publish(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None, reply: str = ""
    ) -> None:
        """Send a message without waiting for an answer."""
        block = b"" if headers is None else encode_headers(headers)
        frame = _encoded(subject, payload, block, encode_subject(reply) if reply else b"", self.max_payload)
        if not self.is_connected:
            # One who tries again at once can be cancelled.
            await asyncio.sleep(0)
            raise self.unsent(f"{_UNSENT} {subject}")
        self.write(frame)
        await self.wait_for_room()

    @asynccontextmanager
    async def discard_inbox(self) -> AsyncIterator[str]:
        """Open an inbox whose messages are dropped."""
        inbox = self.new_inbox()
        subscription = await self.subscribe_raw(inbox, lambda *_: None)
        try:
            yield inbox
        finally:
            await subscription.unsubscribe()

    def unsent(self, text: str) -> JetStreamProviderError:
        """Return the error for what isn't sent, since the connection isn't there."""
        return self.loss if self.close_reason else UnreachableError(f"{text}: {self.loss}")

    async def _answer(
        self,
        subject: str,
        payload: bytes,
        time_limit: float | None,
        headers: dict[str, str] | None = None,
        is_last: Callable[[bytes], bool] | None = None,
    ) -> tuple[bytes, list[RawMessage]]:
        """Send a request as soon as the connection is there, and return its answer, or its answers."""
        limit = self.timeout if time_limit is None else time_limit
        if not (left := await self._time_left(limit)):
            if not self.is_closed:
                raise self._lost(subject, limit)
            # One who tries again at once can be cancelled.
            await asyncio.sleep(0)
            raise self.unsent(f"{_FAILED if headers is None else _UNSENT} {subject}")
        await self._open_inbox()
        group = _RequestGroup([(subject, payload)], stores=headers is not None, limit=left, is_last=is_last)
        self._write_requests(group, None if headers is None else [headers], 0, 1)
        await self._settled(group)
        answer = _result(group.answers[0])
        if isinstance(answer, bytes):
            return answer, group.parts
        raise answer

    async def _time_left(self, limit: float) -> float:
        """Wait for a lost connection, and return the seconds that are left of a time limit; 0 where it isn't there."""
        began = time.monotonic()
        if self.is_connected:
            return limit
        if self.is_closed or not await self.wait_until_connected(limit):
            return 0.0
        return max(began + limit - time.monotonic(), 0.001)

    def _lost(self, subject: str, limit: float) -> UnreachableError:
        return UnreachableError(
            f"the connection is lost for {limit:g} s already, so nothing was sent on {subject}"
            f"{last_report(self.last_error)}"
        )

    def repeat_reads(self) -> None:
        """Send again what only reads and isn't answered yet: after a loss of the connection no answer comes any more.

        The answer is as of a later moment, which is as good for whoever asked. What changes something isn't repeated:
        whether the server has received it isn't known.
        """
        frames = []
        for number, group in list(self._groups.items()):
            position = group.missing[number]
            subject, payload = group.requests[position]
            if group.stores or not is_read(subject):
                continue
            # Under another number: what a server still answers to the first one must not mix with these answers.
            self._requests += 1
            del self._groups[number], group.missing[number]
            self._groups[self._requests], group.missing[self._requests] = group, position
            group.parts.clear()
            frames.append(
                encode_message(encode_subject(subject), payload, b"", b"%b%d" % (self._answers_to, self._requests))
            )
        if frames:
            self.write(b"".join(frames), len(frames))

    async def _request_some(
        self, requests: Sequence[tuple[str, bytes]], headers: Sequence[dict[str, str]] | None, start: int
    ) -> list[bytes | TransientError]:
        """Send the next requests together, and return their answers."""
        limit = await self._time_left(self.timeout)
        if not limit and not self.is_closed:
            return [self._lost(subject, self.timeout) for subject, _ in requests[start : start + MOST_IN_FLIGHT]]
        try:
            await self._open_inbox()
        except UnreachableError as error:
            return [UnreachableError(str(error)) for _ in requests[start:]]
        while len(self._groups) >= MOST_IN_FLIGHT:
            self._room.clear()
            await self._room.wait()
        group = _RequestGroup(requests, stores=headers is not None, limit=limit)
        end = self._write_requests(group, headers, start, MOST_IN_FLIGHT - len(self._groups))
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

    async def _open_inbox(self) -> None:
        if self._inbox and not self._is_inbox_denied:
            return
        async with self._opening:
            if self._is_inbox_denied and self._inbox:
                # The permissions may have changed since.
                await self._inbox.unsubscribe()
                self._inbox = None
            if self._inbox is None:
                inbox, self._is_inbox_denied = self.new_inbox(), False
                self._answers_to = f"{inbox}.".encode()
                self._inbox = await self.subscribe_raw(
                    f"{inbox}.*",
                    self._on_answer,
                    self._deny_requests,
                    AnswerForm(self._answers_to, self._on_answers),
                )

    def _write_requests(
        self, group: _RequestGroup, headers: Sequence[dict[str, str]] | None, start: int, most: int
    ) -> int:
        """Write requests up to a limit, and return the position after the last one."""
        requests, limit = group.requests, self.max_payload
        end, position = min(len(requests), start + most), start
        frames: list[bytes] = []
        size, numbers = 0, {}
        while position < end and size <= _MOST_BYTES:
            subject, payload = requests[position]
            block = encode_headers(headers[position]) if headers and headers[position] else b""
            self._requests += 1
            try:
                frame = _encoded(subject, payload, block, b"%b%d" % (self._answers_to, self._requests), limit)
            except UnreachableError as error:
                group.answers[position] = error
            else:
                frames.append(frame)
                size += len(frame)
                numbers[self._requests] = position
            position += 1
        if frames:
            try:
                self.write(b"".join(frames), len(frames))
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
        if self.close_reason:
            raise same_error(self.close_reason)
        changes, what = False, "no acknowledgement" if group.stores else "no answer"
        if group.parts:
            what = "not all answers"
        reported = last_report(self.last_error)
        for number in list(group.missing):
            subject = group.subject(number)
            changes |= group.stores or changes_state(subject)
            self._settle(number, DeadlineError(f"{what} on {subject} within {group.limit:.3g} s{reported}"))
        if changes:
            await self.drop_unsent()

    def _settle(self, number: int, answer: _Answer) -> None:
        if group := self._groups.pop(number, None):
            group.settle(number, answer)
            self._room.set()

    def _on_answers(self, numbers: Sequence[int], bodies: Sequence[bytes]) -> None:
        for number, body in zip(numbers, bodies, strict=True):
            self._take(number, b"", body)

    def _on_answer(self, subject: bytes, _: bytes, headers: bytes | None, payload: bytes) -> None:
        number = subject[len(self._answers_to) :]
        if number.isdigit() and len(number) <= _MOST_DIGITS:
            self._take(int(number), headers or b"", payload)

    def _take(self, number: int, headers: bytes, body: bytes) -> None:
        if (group := self._groups.get(number)) is None:
            return
        if group.is_last:
            group.parts.append((headers, body))
            if group.is_last(headers):
                self._settle(number, b"")
        elif headers.startswith(NO_RESPONDERS):
            self._settle(number, UnreachableError(nobody_answers(group.subject(number), stores=group.stores)))
        else:
            self._settle(number, body)

    def _deny_requests(self, denial: PermissionDeniedError) -> None:
        prefix = self._answers_to.decode()
        if denial.subject == f"{prefix}*":
            self._is_inbox_denied = True
            for number in list(self._groups):
                self._settle(number, denial.again("on which answers would arrive"))
        elif denial.action == "publish":
            for number, group in list(self._groups.items()):
                if denial.subject in (group.subject(number), f"{prefix}{number}"):
                    self._settle(number, denial.again())


def _encoded(subject: str, payload: bytes, headers: bytes, reply: bytes, limit: int) -> bytes:
    """Encode a message.

    :param limit: the largest message that the server accepts
    :raises UnreachableError: the server would close the connection
    """
    if (size := len(headers) + len(payload)) > limit:
        raise UnreachableError(f"{_UNSENT} {subject}: it has {size} bytes, more than the server's limit of {limit}")
    try:
        return encode_message(encode_subject(subject), payload, headers, reply)
    except WireError as error:
        raise UnreachableError(f"{_UNSENT} {subject}: {error}") from None


def nobody_answers(subject: str, *, stores: bool) -> str:
    """Return the text of the error for a request that nobody answers.

    :param stores: whether the request is a message to be stored
    """
    if stores:
        return f"no stream captures {subject} just now"
    return f"nobody answers on {subject}: the stream, the consumer or JetStream itself is away; try again"


def _result(answer: _Answer) -> bytes | TransientError:
    if isinstance(answer, PermissionDeniedError):
        raise answer
    return answer
