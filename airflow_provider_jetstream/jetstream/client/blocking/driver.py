"""Running the coroutines of scans and redrives over one wire, many requests on their way, without an event loop.

They are the same coroutines as everywhere. A task does nothing else meanwhile, so that all that an event loop is for
comes down to this: send what was asked, and go on with whoever is answered.
"""

from __future__ import annotations

import re
import time
from collections import deque
from contextlib import suppress
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeVar

from airflow_provider_jetstream.jetstream.client.blocking.parser import next_frame
from airflow_provider_jetstream.jetstream.client.blocking.requests import Request, RequestMany, RequestStream
from airflow_provider_jetstream.jetstream.client.concurrency import Gather, Sleep
from airflow_provider_jetstream.jetstream.errors import DeadlineError, JetStreamProviderError, TransientError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket

_Result = TypeVar("_Result")

_ANSWER = re.compile(rb"(H?)MSG \S+\.(\d+) \S+ (?:(\d+) )?(\d+)\r\n")
_CHUNK = 1 << 16
# The line and the empty body of an answer.
_SHORTEST_ANSWER = 56
_STATUS = b"NATS/1.0 "
# A message may have been stored with a status in its first line.
_MESSAGE = b"\r\nNats-Sequence: "


class _Waiting:
    """Who waits, and for what: one answer, a list of as many as are left, or one of all until a status."""

    __slots__ = ("answers", "first", "left", "running", "since", "subject")

    def __init__(
        self, running: _Running, subject: str, first: int, answers: list[Any] | None = None, left: int = 1
    ) -> None:
        self.running = running
        self.subject = subject
        self.since = time.monotonic()
        self.first = first
        self.left = left
        self.answers = answers


class _Group:
    __slots__ = ("left", "parent", "results")

    def __init__(self, parent: _Running, size: int) -> None:
        self.parent = parent
        self.left = size
        self.results: list[Any] = [None] * size


class _Running:
    __slots__ = ("coroutine", "group", "place")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], group: _Group | None = None, place: int = 0) -> None:
        self.coroutine = coroutine
        self.group = group
        self.place = place


class CoroutineDriver:
    """Runs coroutines that ask over one wire.

    :param wire: an open connection
    """

    def __init__(self, wire: NatsSocket) -> None:
        self.wire = wire
        self.broken: TransientError | None = None
        self._inbox = wire.inbox.encode()
        self._number = 0
        self._chunk: list[bytes] = []
        self._size = 0
        # Who waits for which answer, since when, and where it was asked; the oldest first.
        self._waiting: dict[int, _Waiting] = {}
        self._ready: deque[tuple[_Running, Any, Exception | None]] = deque()
        self._pausing: list[tuple[float, _Running]] = []
        self._result: Any = None

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine to its end.

        :param coroutine: the coroutine
        :return: its result
        :raises Exception: what it raises
        """
        root = _Running(coroutine)
        self._ready.append((root, None, None))
        try:
            while True:
                while self._ready:
                    self._step(*self._ready.popleft())
                if self._result is not None:
                    (result,), self._result = self._result, None
                    return result  # type: ignore[no-any-return]
                self._wait_for_answers()
        finally:
            self._ready.clear()
            self._waiting.clear()
            self._pausing.clear()
            coroutine.close()

    def send(self, subject: str, payload: bytes, header: bytes = b"", reply: bytes = b"") -> None:
        """Send a message with the next requests.

        :param subject: where it goes
        :param payload: its body
        :param header: its header as it is on the wire
        :param reply: where answers go
        """
        if header:
            line = b"HPUB %b %b %d %d\r\n" % (subject.encode(), reply, len(header), len(header) + len(payload))
            self._chunk += (line, header, payload, b"\r\n")
        else:
            self._chunk += (b"PUB %b %b %d\r\n" % (subject.encode(), reply, len(payload)), payload, b"\r\n")
        self._size += len(header) + len(payload) + 64
        if self._size > _CHUNK:
            self._flush()

    def _step(self, running: _Running, value: Any, error: Exception | None) -> None:
        try:
            asked = running.coroutine.throw(error) if error else running.coroutine.send(value)
        except StopIteration as end:
            self._finish(running, end.value)
        except JetStreamProviderError as raised:
            if running.group is None:
                raise
            self._finish(running, raised)
        else:
            self._wait(running, asked)

    def _wait(self, running: _Running, asked: Any) -> None:
        match asked:
            case Request() | RequestStream() | RequestMany() if self.broken:
                self._ready.append((running, None, type(self.broken)(str(self.broken))))
            case Request():
                self._number += 1
                self._waiting[self._number] = _Waiting(running, asked.subject, self._number)
                self.send(asked.subject, asked.payload, asked.header, b"%b.%d" % (self._inbox, self._number))
            case RequestStream():
                self._number += 1
                self._waiting[self._number] = _Waiting(running, asked.subject, self._number, [], 0)
                self.send(asked.subject, asked.payload, b"", b"%b.%d" % (self._inbox, self._number))
            case RequestMany():
                self._ask_each(running, asked)
            case Gather():
                group = _Group(running, len(asked.coroutines))
                if not group.left:
                    self._ready.append((running, [], None))
                for place, each in enumerate(asked.coroutines):
                    self._ready.append((_Running(each, group, place), None, None))
            case Sleep():
                self._pausing.append((time.monotonic() + asked.seconds, running))
            case _:
                raise TypeError(f"expected a request, found {asked!r}: this coroutine needs an event loop")

    def _ask_each(self, running: _Running, asked: RequestMany) -> None:
        count, first = len(asked.requests), self._number + 1
        if not count:
            self._ready.append((running, [], None))
            return
        self._number += count
        waiting = _Waiting(running, asked.requests[0][0], first, [None] * count, count)
        self._waiting.update(dict.fromkeys(range(first, first + count), waiting))
        headers = asked.headers or repeat(b"")
        for number, ((subject, payload), header) in enumerate(zip(asked.requests, headers, strict=False), first):
            self.send(subject, payload, header, b"%b.%d" % (self._inbox, number))

    def _finish(self, running: _Running, result: Any) -> None:
        group = running.group
        if group is None:
            self._result = (result,)
            return
        group.results[running.place] = result
        group.left -= 1
        if not group.left:
            self._ready.append((group.parent, group.results, None))

    def _wait_for_answers(self) -> None:
        if not self._waiting:
            due, running = min(self._pausing, key=lambda each: each[0])
            self._pausing.remove((due, running))
            time.sleep(max(0.0, due - time.monotonic()))
            self._ready.append((running, None, None))
            return
        try:
            self._flush()
            left = next(iter(self._waiting.values())).since + self.wire.timeout - time.monotonic()
            with suppress(DeadlineError):
                enough = _SHORTEST_ANSWER * len(self._waiting)
                self.wire.receive(lambda _buffer, filled: filled >= enough, max(left, 0.0))
                self._read_answers()
            self._expire_late_requests()
        except TransientError as error:
            self.broken = error
            for waiting in dict.fromkeys(self._waiting.values()):
                self._ready.append((waiting.running, None, type(error)(str(error))))
            self._waiting.clear()

    def _expire_late_requests(self) -> None:
        now = time.monotonic()
        while self._waiting and (waiting := next(iter(self._waiting.values()))).since + self.wire.timeout <= now:
            self._waiting = {number: each for number, each in self._waiting.items() if each is not waiting}
            error = DeadlineError(f"no answer on {waiting.subject} within {self.wire.timeout:g} s")
            self._ready.append((waiting.running, None, error))

    def _flush(self) -> None:
        chunk, self._chunk, self._size = self._chunk, [], 0
        if chunk and not self.broken:
            try:
                self.wire.send(b"".join(chunk))
            except TransientError as error:
                self.broken = error
        if self.broken:
            raise self.broken

    def _read_answers(self) -> None:
        wire, at = self.wire, 0
        buffer, filled = wire.buffer, wire.filled
        while found := _ANSWER.match(buffer, at, filled):
            kind, number, header_size, size = found.groups()
            if bool(kind) != bool(header_size):
                break
            body = found.end()
            end = body + int(size)
            if end + 2 > filled:
                break
            at = end + 2
            header = body + int(header_size or 0)
            self._deliver_answer(int(number), bytes(buffer[body:header]), bytes(buffer[header:end]))
        while frame := next_frame(buffer, at, filled):
            at = frame.end
            if not frame.sid:
                wire.answer(frame)
                continue
            subject, subject_end, _, _, header, body, end = frame.parts
            token = bytes(buffer[subject:subject_end]).rpartition(b".")[2]
            number = int(token) if token.isdigit() else -1
            self._deliver_answer(number, bytes(buffer[header:body]), bytes(buffer[body:end]))
        wire.consume(at)

    def _deliver_answer(self, number: int, header: bytes, body: bytes) -> None:
        if (waiting := self._waiting.get(number)) is None:
            return
        answer = (header, body)
        if waiting.answers is None:
            del self._waiting[number]
            self._ready.append((waiting.running, answer, None))
        elif waiting.left:
            del self._waiting[number]
            waiting.answers[number - waiting.first] = answer
            waiting.left -= 1
            if not waiting.left:
                self._ready.append((waiting.running, waiting.answers, None))
        else:
            waiting.answers.append(answer)
            if header.startswith(_STATUS) and _MESSAGE not in header:
                del self._waiting[number]
                self._ready.append((waiting.running, waiting.answers, None))
