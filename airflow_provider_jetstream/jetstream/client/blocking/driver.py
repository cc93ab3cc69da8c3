"""Runs the core's coroutines over one blocking socket, with many requests in flight and no event loop.

The coroutines are the same as on an event loop. Where they wait, they yield a request, a group of coroutines or a sleep
(:mod:`.requests`, :mod:`..concurrency`), and the driver resumes each one when its answer has come. A Spark task does
nothing else meanwhile, so an event loop would only add cost.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeVar

from airflow_provider_jetstream.jetstream.client.blocking.requests import Request, RequestBatch, RequestMany
from airflow_provider_jetstream.jetstream.client.concurrency import Gather, Sleep
from airflow_provider_jetstream.jetstream.client.direct_get import is_last_of_batch
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
    from collections.abc import Coroutine

    from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket

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

    ``answers`` is ``None`` for a single request, a list of fixed length for many, and a growing list for a batch, whose
    ``missing`` is 0.
    """

    __slots__ = ("answers", "first_number", "missing", "sent_at", "subject", "task")

    def __init__(
        self,
        task: _RunningCoroutine,
        subject: str,
        first_number: int,
        answers: list[Any] | None = None,
        missing: int = 1,
    ) -> None:
        self.task = task
        self.subject = subject
        self.sent_at = time.monotonic()
        self.first_number = first_number
        self.missing = missing
        self.answers = answers


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
            case Request() | RequestBatch() | RequestMany() if self.broken:
                self._ready.append((task, None, same_error(self.broken)))
            case Request():
                self._number += 1
                self._pending[self._number] = _Pending(task, awaited.subject, self._number)
                self.send(awaited.subject, awaited.payload, awaited.header, b"%b.%d" % (self._inbox, self._number))
            case RequestBatch():
                self._number += 1
                self._pending[self._number] = _Pending(task, awaited.subject, self._number, [], 0)
                self.send(awaited.subject, awaited.payload, b"", b"%b.%d" % (self._inbox, self._number))
            case RequestMany():
                self._start_many(task, awaited)
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

    def _start_many(self, task: _RunningCoroutine, awaited: RequestMany) -> None:
        count, first_number = len(awaited.requests), self._number + 1
        if not count:
            self._ready.append((task, [], None))
            return
        self._number += count
        pending = _Pending(task, awaited.requests[0][0], first_number, [None] * count, count)
        self._pending.update(dict.fromkeys(range(first_number, first_number + count), pending))
        headers = awaited.headers or repeat(b"")
        for number, ((subject, payload), header) in enumerate(
            zip(awaited.requests, headers, strict=False), first_number
        ):
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
        answer = (header, body)
        if pending.answers is None:
            del self._pending[number]
            self._ready.append((pending.task, answer, None))
        elif pending.missing:
            del self._pending[number]
            pending.answers[number - pending.first_number] = answer
            pending.missing -= 1
            if not pending.missing:
                self._ready.append((pending.task, pending.answers, None))
        else:
            pending.answers.append(answer)
            if is_last_of_batch(header):
                del self._pending[number]
                self._ready.append((pending.task, pending.answers, None))
