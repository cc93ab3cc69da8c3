"""The connection on a blocking socket, and the driver that runs the core's coroutines over it, without an event loop.

The coroutines are the same as on an event loop. Where they wait, they yield a request, a group of coroutines or a sleep
(:mod:`..concurrency`), and the driver resumes each one when its answer has come. A Spark task does nothing else
meanwhile, so an event loop would only add cost.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import asynccontextmanager, suppress
from itertools import repeat
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from airflow_provider_jetstream.jetstream.client.concurrency import Gather, Sleep
from airflow_provider_jetstream.jetstream.client.connection import Connection, is_only_answer
from airflow_provider_jetstream.jetstream.client.headers import NO_RESPONDERS, encode_headers
from airflow_provider_jetstream.jetstream.client.loop_connection import MOST_IN_FLIGHT, nobody_answers
from airflow_provider_jetstream.jetstream.client.stream_api import list_streams
from airflow_provider_jetstream.jetstream.client.streams import BATCHES, exact_streams
from airflow_provider_jetstream.jetstream.client.unsent import changes_state
from airflow_provider_jetstream.jetstream.client.wire import encode_message
from airflow_provider_jetstream.jetstream.client.wire_text import encode_text
from airflow_provider_jetstream.jetstream.errors import (
    DeadlineError,
    JetStreamProviderError,
    PermissionDeniedError,
    TransientError,
    UnreachableError,
    same_error,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Sequence

    from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
    from airflow_provider_jetstream.jetstream.client.connection import RawMessage


class Request:
    """Requests with one answer each, in their order; or one request with many answers.

    :param requests: subjects and bodies
    :param headers: for each request its headers as they are on the wire; none where absent
    :param is_last: where one request has many answers, what tells the last one by its headers
    """

    __slots__ = ("headers", "is_last", "requests")

    def __init__(
        self,
        requests: Sequence[tuple[str, bytes]],
        headers: Sequence[bytes] | None = None,
        is_last: Callable[[bytes], bool] | None = None,
    ) -> None:
        self.requests = requests
        self.headers = headers
        self.is_last = is_last

    def __await__(self) -> Generator[Request, list[RawMessage], list[RawMessage]]:
        return (yield self)


_Result = TypeVar("_Result")

_CHUNK = 1 << 16
# The protocol line and the empty body of an answer.
_SHORTEST_ANSWER = 56


class _RunningCoroutine:
    """A coroutine that the driver runs, and its index in the group that waits for its result."""

    __slots__ = ("coroutine", "group", "index")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], group: _Group | None = None, index: int = 0) -> None:
        self.coroutine = coroutine
        self.group = group
        self.index = index


class _Group:
    """Coroutines that run side by side, and the task that waits for all of them."""

    __slots__ = ("missing", "parent", "results")

    def __init__(self, parent: _RunningCoroutine, size: int) -> None:
        self.parent = parent
        self.missing = size
        self.results: list[Any] = [None] * size


class _Pending:
    """Requests of one task that aren't answered yet.

    :ivar answers: of fixed length; a growing list where one request has many answers
    """

    __slots__ = ("answers", "first_number", "is_last", "missing", "sent_at", "subject", "task")

    def __init__(self, task: _RunningCoroutine, awaited: Request, first_number: int) -> None:
        count = len(awaited.requests)
        self.task = task
        self.subject = awaited.requests[0][0]
        self.sent_at = time.monotonic()
        self.first_number = first_number
        self.is_last = awaited.is_last
        self.missing = count
        self.answers: list[Any] = [] if awaited.is_last else [None] * count


class CoroutineDriver:
    """Runs coroutines that wait for answers from one socket.

    :param socket: an open connection
    """

    def __init__(self, socket: NatsSocket) -> None:
        self.socket = socket
        self.broken: TransientError | None = None
        self._inbox = socket.inbox.encode()
        self._number = 0
        self._chunk: list[bytes] = []
        self._chunk_size = 0
        # By request number, the oldest first.
        self._pending: dict[int, _Pending] = {}
        # Tasks to resume, each with a value or an exception.
        self._ready: deque[tuple[_RunningCoroutine, Any, Exception | None]] = deque()
        self._sleeping: list[tuple[float, _RunningCoroutine]] = []
        self._result: Any = None

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine to its end and return its result.

        :raises Exception: what the coroutine raises
        """
        self._ready.append((_RunningCoroutine(coroutine), None, None))
        try:
            while True:
                while self._ready:
                    self._resume(*self._ready.popleft())
                if self._result is not None:
                    (result,), self._result = self._result, None
                    return result  # type: ignore[no-any-return]
                self._wait()
        finally:
            self._ready.clear()
            self._pending.clear()
            self._sleeping.clear()
            coroutine.close()

    def send(self, subject: str, payload: bytes, header: bytes = b"", reply: bytes = b"") -> None:
        """Send a message together with the next requests.

        :param header: its headers as they are on the wire
        :param reply: the subject for answers
        """
        self._append(encode_message(encode_text(subject), payload, header, reply))

    def write(self, frames: bytes) -> None:
        """Send encoded messages together with the next requests.

        :raises UnreachableError: the connection is broken
        """
        if self.broken:
            raise UnreachableError(str(self.broken))
        self._append(frames)

    def drop_unsent(self) -> None:
        """Break the connection unless the server answers a ping in time, and so has received what was written."""
        try:
            self._flush()
            if not self.socket.answers_ping(self._read_answers):
                raise UnreachableError("the server hasn't answered for too long: the connection is dropped")
        except TransientError as error:
            self._break(error)

    def _append(self, frames: bytes) -> None:
        self._chunk.append(frames)
        self._chunk_size += len(frames)
        if self._chunk_size > _CHUNK:
            self._flush()

    def _resume(self, task: _RunningCoroutine, value: Any, error: Exception | None) -> None:
        try:
            awaited = task.coroutine.throw(error) if error else task.coroutine.send(value)
        except StopIteration as end:
            self._finish(task, end.value)
        except JetStreamProviderError as raised:
            if task.group is None:
                raise
            self._finish(task, raised)
        else:
            self._start(task, awaited)

    def _start(self, task: _RunningCoroutine, awaited: Any) -> None:
        match awaited:
            case Request() if self.broken:
                self._ready.append((task, None, same_error(self.broken)))
            case Request():
                self._start_requests(task, awaited)
            case Gather():
                group = _Group(task, len(awaited.coroutines))
                if not group.missing:
                    self._ready.append((task, [], None))
                for index, coroutine in enumerate(awaited.coroutines):
                    self._ready.append((_RunningCoroutine(coroutine, group, index), None, None))
            case Sleep():
                self._sleeping.append((time.monotonic() + awaited.seconds, task))
            case _:
                raise TypeError(f"expected a request, found {awaited!r}: this coroutine needs an event loop")

    def _start_requests(self, task: _RunningCoroutine, awaited: Request) -> None:
        count, first_number = len(awaited.requests), self._number + 1
        if not count:
            self._ready.append((task, [], None))
            return
        self._number += count
        pending = _Pending(task, awaited, first_number)
        headers = awaited.headers or repeat(b"")
        for number, ((subject, payload), header) in enumerate(
            zip(awaited.requests, headers, strict=False), first_number
        ):
            self._pending[number] = pending
            self.send(subject, payload, header, b"%b.%d" % (self._inbox, number))

    def _finish(self, task: _RunningCoroutine, result: Any) -> None:
        group = task.group
        if group is None:
            self._result = (result,)
            return
        group.results[task.index] = result
        group.missing -= 1
        if not group.missing:
            self._ready.append((group.parent, group.results, None))

    def _wait(self) -> None:
        """Wait for answers; where no request is pending, until the first sleep is over."""
        if not self._pending:
            wake_at, task = min(self._sleeping, key=lambda sleeping: sleeping[0])
            self._sleeping.remove((wake_at, task))
            time.sleep(max(0.0, wake_at - time.monotonic()))
            self._ready.append((task, None, None))
            return
        try:
            self._flush()
            oldest = next(iter(self._pending.values()))
            with suppress(DeadlineError):
                enough = _SHORTEST_ANSWER * len(self._pending)
                left = max(oldest.sent_at + self.socket.timeout - time.monotonic(), 0.0)
                self.socket.receive(lambda _buffer, filled: filled >= enough, left)
                self._read_answers()
            self._expire_requests()
        except TransientError as error:
            self._break(error)
            for pending in dict.fromkeys(self._pending.values()):
                self._ready.append((pending.task, None, same_error(error)))
            self._pending.clear()

    def _break(self, error: TransientError) -> None:
        """Give the connection up; nothing that isn't sent yet is sent later."""
        self.broken = error
        self.socket.abort()

    def _expire_requests(self) -> None:
        """Fail the requests that aren't answered in time.

        :raises UnreachableError: one that changes something may not have arrived
        """
        now, changes = time.monotonic(), False
        while self._pending and (oldest := next(iter(self._pending.values()))).sent_at + self.socket.timeout <= now:
            self._pending = {number: pending for number, pending in self._pending.items() if pending is not oldest}
            error = DeadlineError(f"no answer on {oldest.subject} within {self.socket.timeout:g} s")
            self._ready.append((oldest.task, None, error))
            changes |= changes_state(oldest.subject)
        if changes and not self.socket.answers_ping(self._read_answers):
            raise UnreachableError("the server hasn't answered for too long: the connection is dropped")

    def _flush(self) -> None:
        chunk, self._chunk, self._chunk_size = self._chunk, [], 0
        if chunk and not self.broken:
            try:
                self.socket.send(b"".join(chunk))
            except TransientError as error:
                self._break(error)
        if self.broken:
            raise self.broken

    def _read_answers(self) -> None:
        socket, position = self.socket, 0
        buffer = socket.buffer
        while frame := socket.next_frame(position):
            position = frame.end
            if not frame.sid:
                try:
                    socket.handle_control(frame)
                except PermissionDeniedError as denial:
                    if not self._deny(denial):
                        socket.consume(position)
                        raise
                continue
            subject, subject_end, _, _, header, body, end = frame.offsets
            token = bytes(buffer[subject:subject_end]).rpartition(b".")[2]
            self._deliver(int(token) if token.isdigit() else -1, bytes(buffer[header:body]), bytes(buffer[body:end]))
        socket.consume(position)

    def _deny(self, denial: PermissionDeniedError) -> bool:
        """Let the requests on a denied subject fail; return whether there are any."""
        denied = {number: pending for number, pending in self._pending.items() if pending.subject == denial.subject}
        for number in denied:
            del self._pending[number]
        for pending in dict.fromkeys(denied.values()):
            self._ready.append((pending.task, None, denial.again()))
        return bool(denied)

    def _deliver(self, number: int, header: bytes, body: bytes) -> None:
        if (pending := self._pending.get(number)) is None:
            return
        if pending.is_last:
            pending.answers.append((header, body))
            if not pending.is_last(header):
                return
        else:
            pending.answers[number - pending.first_number] = (header, body)
        del self._pending[number]
        pending.missing -= 1
        if not pending.missing:
            self._ready.append((pending.task, pending.answers, None))


def _one_body(subject: str, answers: list[RawMessage], *, stores: bool) -> bytes:
    """Return the body of the one answer to a request.

    :param stores: whether the request is a message to be stored
    :raises UnreachableError: nobody answers
    """
    ((header, body),) = answers
    if header.startswith(NO_RESPONDERS):
        raise UnreachableError(nobody_answers(subject, stores=stores))
    return body


class BlockingConnection(Connection):
    """A connection whose coroutines :meth:`run` drives without an event loop.

    A broken connection isn't restored: its user opens another one and begins again.

    :param socket: an open connection
    """

    def __init__(self, socket: NatsSocket) -> None:
        self.socket = socket
        self.timeout = socket.timeout
        self.api_prefix = socket.api_prefix
        self.api_level = 0
        self._driver = CoroutineDriver(socket)

    @property
    def server_version(self) -> tuple[int, int, int]:
        """The server's version as numbers."""
        major, minor, patch = self.socket.version
        return major, minor, patch

    @property
    def max_payload(self) -> int:
        """The largest message that the server accepts, headers included, in bytes."""
        return self.socket.max_payload

    @property
    def reconnects(self) -> int:
        """Always 0."""
        return 0

    @property
    def broken(self) -> TransientError | None:
        """What broke the connection, if anything did."""
        return self._driver.broken

    @property
    def is_connected(self) -> bool:
        """Whether nothing has broken the connection."""
        return self._driver.broken is None

    @property
    def is_closed(self) -> bool:
        """Whether the connection is broken; it isn't restored."""
        return self._driver.broken is not None

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine that uses this connection, and return its result.

        :raises Exception: what the coroutine raises
        """
        return self._driver.run(coroutine)

    async def request(self, subject: str, payload: bytes = b"", *, time_limit: float | None = None) -> bytes:
        """Send a request and return the body of its one answer; the connection's own timeout applies."""
        return _one_body(subject, await Request([(subject, payload)]), stores=False)

    async def ask(
        self, subject: str, payload: bytes = b"", is_last: Callable[[bytes], bool] = is_only_answer
    ) -> list[RawMessage]:
        """Send a request and return all of its answers."""
        return await Request([(subject, payload)], is_last=is_last)

    async def request_many(
        self, requests: Sequence[tuple[str, bytes]], headers: Sequence[dict[str, str]] | None = None
    ) -> list[bytes | TransientError]:
        """Send many requests together."""
        answers: list[bytes | TransientError] = []
        for start in range(0, len(requests), MOST_IN_FLIGHT):
            some = requests[start : start + MOST_IN_FLIGHT]
            encoded = [encode_headers(pairs) for pairs in headers[start : start + MOST_IN_FLIGHT]] if headers else None
            try:
                raw_answers = await Request(some, encoded)
            except TransientError as error:
                # Some may have been answered; the caller looks up what became of each.
                answers += [error] * len(some)
                continue
            for (subject, _), answer in zip(some, raw_answers, strict=True):
                try:
                    answers.append(_one_body(subject, [answer], stores=headers is not None))
                except UnreachableError as error:
                    answers.append(error)
        return answers

    async def publish(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None, reply: str = ""
    ) -> None:
        """Send a message with the next requests, without waiting for an answer."""
        self._driver.send(subject, payload, b"" if headers is None else encode_headers(headers), reply.encode())

    async def publish_acknowledged(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None, *, time_limit: float | None = None
    ) -> bytes:
        """Publish a message and return the answer of the stream that captures it; the connection's timeout applies."""
        encoded = [b"" if headers is None else encode_headers(headers)]
        return _one_body(subject, await Request([(subject, payload)], encoded), stores=True)

    def write(self, frames: bytes, messages: int = 1) -> None:
        """Send encoded messages with the next requests."""
        self._driver.write(frames)

    async def wait_for_room(self) -> None:
        """Return at once: the socket blocks until the operating system has taken what is written."""

    async def drop_unsent(self) -> None:
        """Give the connection up where the server doesn't show in time that it has received all that was written."""
        self._driver.drop_unsent()

    def new_inbox(self) -> str:
        """Return a new subject for answers."""
        return self.socket.new_reply_subject()

    async def subscribe_raw(
        self, subject: str, on_message: object, on_denied: object = None, form: object = None
    ) -> NoReturn:
        """Refuse: a callback needs an event loop."""
        raise TypeError(
            f"expected a connection with an event loop for a subscription to {subject}, found a blocking one"
        )

    @asynccontextmanager
    async def discard_inbox(self) -> AsyncIterator[str]:
        """Open an inbox whose messages are dropped."""
        # No request has this number.
        yield f"{self.socket.inbox}.0"

    async def discover_capabilities(self, streams: Iterable[str]) -> None:
        """Find out the server's API level and domain, and which streams answer direct gets as exactly as the API.

        :param streams: names of streams, which needn't exist
        """
        account = await self.api("INFO")
        self.api_level = int(account.get("api", {}).get("level", 0))
        self.domain = str(account.get("domain") or "")
        names = set(streams)
        if names and self.api_level >= BATCHES:
            configs = [info["config"] for info in await list_streams(self)]
            self.exact_streams = frozenset(exact_streams(configs, names))
