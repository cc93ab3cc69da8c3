"""Publishing one task's rows: many on their way at a time, and an acknowledgement for each before the task ends."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np

from airflow_provider_jetstream.jetstream.client.blocking.parser import Frame, next_frame
from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.jetstream.errors import DeadlineError, JetStreamProviderError, TransientError
from airflow_provider_jetstream.jetstream.publishing.report import sequence_ranges
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.errors import RowsNotStoredError
from airflow_provider_jetstream.spark.source.publish_batch import PublishBatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from airflow_provider_jetstream.spark.source.options import WriteOptions
    from airflow_provider_jetstream.spark.source.row_encoder import EncodedRows

# Connections in a row that brought no acknowledgement, after which the task gives up and Spark decides.
_ATTEMPTS = 5
_PAUSE = 0.25
_CHUNK = 1 << 17
_BYTES_IN_FLIGHT = 32 << 20
# With more rows refused than this, the rest isn't tried.
_MOST_FAILURES = 1000
_EXAMPLES = 5
_FORBIDDEN_SUBJECT = re.compile(rb'Permissions Violation for Publish to "([^"]+)"', re.IGNORECASE)


@dataclass
class _Failed:
    indexes: list[int] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)


class Publisher:
    """Publishes rows and counts what the stream says to them.

    :param given: the data source's options, from which the connection is made
    :param options: the same ones, understood
    :param where: names the rows' partition in errors
    """

    def __init__(self, given: Mapping[str, str], options: WriteOptions, where: str) -> None:
        self.count = 0
        self.stored = 0
        self.duplicates = 0
        self._given = given
        self._options = options
        self._where = where
        self._inbox = f"_INBOX.{uuid4().hex}"
        self._reply = f"{self._inbox}.r".encode()
        # Unanswered rows in order, with their sizes, and what they are parts of.
        self._rows: dict[int, int] = {}
        self._parts: list[PublishBatch] = []
        self._bytes = 0
        # A quarter of the window goes out together.
        self._together = max(1, options.max_in_flight // 4)
        # Rows that nobody took, since when, and when they are tried again.
        self._absent: list[int] = []
        self._absent_since: dict[int, float] = {}
        self._absent_until = 0.0
        self._failures: dict[str, _Failed] = {}
        self._failed = 0
        self._broken = 0
        self._open()

    def close(self) -> None:
        """Hang up."""
        self.wire.close()

    def send(self, messages: EncodedRows) -> None:
        """Publish rows, waiting for others where too many are unanswered.

        :param messages: the rows
        :raises RowsNotStoredError: so many failed that the rest isn't tried, or the server is away
        """
        oldest = next(iter(self._rows), self.count)
        part = PublishBatch.from_rows(messages, self.count, self._reply)
        self._parts = [*(part for part in self._parts if part.end > oldest), part]
        sizes: dict[int, int] = dict(zip(range(self.count, part.end), messages.sizes.tolist(), strict=True))
        self.count = part.end
        problems = {part.start + place: problem for place, problem in messages.problems.items()}
        for place in np.flatnonzero(messages.sizes > self._limit).tolist():
            problems.setdefault(part.start + place, self._too_large())
        for index in sorted(problems):
            del sizes[index]
            self._fail(index, problems[index])
        if self._failed > _MOST_FAILURES:
            self.settle()
        for first, last in part.chunks(sorted(problems), self._together, _CHUNK):
            self._settle(self._options.max_in_flight - (last - first), _BYTES_IN_FLIGHT)
            if self._failed > _MOST_FAILURES:
                self.settle()
            for index in range(first, last):
                self._rows[index] = sizes[index]
                self._bytes += sizes[index]
            self._carefully(partial(self._send, part.frames(first, last)))

    def settle(self) -> None:
        """Wait until every row is answered.

        :raises RowsNotStoredError: some aren't stored, or nobody knows
        """
        self._settle(0, 0)
        if self._failures:
            raise RowsNotStoredError(self._report())

    def _open(self) -> None:
        self.wire = NatsSocket(socket_settings(self._given), self._inbox)
        self._limit = self.wire.max_payload
        acknowledgement = (
            rb"MSG %b(\d+) %b \d+\r\n"
            rb'\{"stream": ?"%b", ?"seq": ?\d+(?:, ?"domain": ?"[^"]*")?(, ?"duplicate": ?true)?\}\r\n'
            % tuple(map(re.escape, (self._reply, self.wire.sid, self._options.stream.encode())))
        )
        self._acknowledgement = re.compile(acknowledgement)
        # Possessive: what was matched is never looked at again.
        self._acknowledgements = re.compile(rb"(?:%b)*+" % acknowledgement)

    def _send(self, frames: memoryview) -> None:
        self.wire.send(frames)

    def _part(self, index: int) -> PublishBatch:
        return next(part for part in self._parts if index < part.end)

    def _send_again(self, indexes: Iterable[int]) -> None:
        self.wire.send(b"".join(self._part(index).frames(index, index + 1) for index in indexes))

    def _settle(self, rows: int, size: int) -> None:
        while len(self._rows) > rows or self._bytes > size:
            self._carefully(self._listen)

    def _carefully(self, step: Any) -> None:
        try:
            step()
        except TransientError as error:
            self._again(error)
        except RowsNotStoredError:
            raise
        except JetStreamProviderError as error:
            self._give_up(error)

    def _listen(self) -> None:
        now = time.monotonic()
        if self._absent and now >= self._absent_until:
            self._retry_absent(now)
        wait = min(self._options.ack_timeout, self._absent_until - now) if self._absent else self._options.ack_timeout
        try:
            self.wire.receive(lambda _buffer, _filled: True, wait)
        except DeadlineError:
            if not self._absent:
                raise
        buffer, filled, at = self.wire.buffer, self.wire.filled, 0
        while True:
            found = self._acknowledgements.match(buffer, at, filled)
            if found and found.end() > at:
                self._acknowledged(self._acknowledgement.findall(buffer, at, found.end()))
                at = found.end()
            if frame := next_frame(buffer, at, filled):
                at = frame.end
                self._other(frame)
            else:
                break
        self.wire.consume(at)

    def _acknowledged(self, answers: Iterable[tuple[bytes, bytes]]) -> None:
        """Take rows for stored: for each, its number, and whether the stream had it already."""
        for index, duplicate in answers:
            if self._taken(int(index)):
                self.stored += 1
                self._broken = 0
                if duplicate:
                    self.duplicates += 1

    def _taken(self, index: int) -> bool:
        size = self._rows.pop(index, None)
        self._bytes -= size or 0
        return size is not None

    def _other(self, frame: Frame) -> None:
        if not frame.sid:
            if refused := _FORBIDDEN_SUBJECT.search(frame.line):
                subject = refused[1]
                for index in [index for index in self._rows if self._part(index).subject(index) == subject]:
                    self._refuse(index, f"the server doesn't allow publishing to {subject.decode()}")
                return
            self.wire.answer(frame)
            return
        subject, subject_end, _, _, header, body, end = frame.parts
        last_token = bytes(self.wire.buffer[subject:subject_end]).rpartition(b".")[2]
        index = int(last_token[1:]) if last_token[1:].isdigit() else -1
        if index not in self._rows:
            return
        if self.wire.buffer[header:body].startswith(b"NATS/1.0 503"):
            self._nobody(index)
            return
        self._answered(index, bytes(self.wire.buffer[body:end]))

    def _answered(self, index: int, body: bytes) -> None:
        try:
            answer = json.loads(body)
        except ValueError:
            return
        if not isinstance(answer, dict):
            # From somebody else who listens on the subject; the stream's own answer may still come.
            return
        if error := answer.get("error"):
            self._refuse(index, f"{error.get('description')} (error {error.get('err_code')})")
        elif answer.get("stream") == self._options.stream and isinstance(answer.get("seq"), int):
            self._acknowledged([(b"%d" % index, b"again" if answer.get("duplicate") else b"")])

    def _nobody(self, index: int) -> None:
        now = time.monotonic()
        if now - self._absent_since.setdefault(index, now) > self._options.ack_timeout:
            subject = self._part(index).subject(index).decode()
            self._refuse(index, f"no stream stores {subject}: {self._options.stream} doesn't, or it is away")
            return
        if not self._absent:
            self._absent_until = now + _PAUSE
        self._absent.append(index)

    def _retry_absent(self, now: float) -> None:
        waiting, self._absent = self._absent, []
        self._absent_until = now + _PAUSE
        self._send_again(index for index in waiting if index in self._rows)

    def _again(self, error: JetStreamProviderError) -> None:
        """Connect anew, and send again whatever isn't acknowledged: the stream knows it by its id if it has it."""
        while True:
            self._broken += 1
            if self._broken > _ATTEMPTS:
                self._give_up(error)
            self.wire.close()
            time.sleep(_PAUSE * self._broken)
            try:
                self._open()
                self._absent = []
                self._send_again(self._rows)
            except TransientError as another:
                error = another
            except JetStreamProviderError as another:
                self._give_up(another)
            else:
                return

    def _give_up(self, error: JetStreamProviderError) -> None:
        for index in list(self._rows):
            self._refuse(index, f"no acknowledgement: {error}")
        raise RowsNotStoredError(self._report()) from None

    def _too_large(self) -> str:
        return f"body and headers have more than the {self._limit} bytes that the server takes"

    def _refuse(self, index: int, reason: str) -> None:
        if self._taken(index):
            self._fail(index, reason)

    def _fail(self, index: int, reason: str) -> None:
        failed = self._failures.setdefault(reason, _Failed())
        failed.indexes.append(index)
        self._failed += 1
        if len(failed.examples) < _EXAMPLES:
            failed.examples.append(self._part(index).row_name(index))

    def _report(self) -> str:
        lines = [
            f"rows {_spans(failed.indexes)}: {reason} (such as {', '.join(failed.examples)})"
            for reason, failed in self._failures.items()
        ]
        if self._failed > _MOST_FAILURES:
            lines.append(f"rows from {self.count} on: not tried after so many failures")
        told = "".join(f"\n  - {line}" for line in lines)
        return (
            f"{self._failed} rows of {self._where}, counted from 0, aren't known to be stored; {self.stored} others"
            f" are. To write them again with the same ids is safe while the stream's duplicate window lasts.{told}"
        )


def _spans(indexes: list[int]) -> str:
    # Ranges are of sequences, which begin at one.
    spans = sequence_ranges(index + 1 for index in sorted(indexes))
    return ", ".join(str(low - 1) if low == high else f"{low - 1}-{high - 1}" for low, high in spans)
