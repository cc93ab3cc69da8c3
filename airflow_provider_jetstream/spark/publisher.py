"""Publishing one task's rows: many on their way at a time, and an acknowledgement for each before the task ends."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from airflow_provider_jetstream.jetstream.errors import DeadlineError, JetStreamProviderError, TransientError
from airflow_provider_jetstream.jetstream.publish_report import ranges
from airflow_provider_jetstream.spark.connection_options import wire_settings
from airflow_provider_jetstream.spark.errors import RowsNotStoredError
from airflow_provider_jetstream.spark.frames import Frame, next_frame
from airflow_provider_jetstream.spark.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.spark.options import WriteOptions
    from airflow_provider_jetstream.spark.rows import Message

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
        # Unanswered rows in order: the message, and when it was sent first.
        self._rows: dict[int, tuple[Message, float]] = {}
        self._bytes = 0
        self._chunk: list[bytes] = []
        self._chunk_bytes = 0
        self._absent: list[int] = []
        self._absent_until = 0.0
        self._failures: dict[str, _Failed] = {}
        self._failed = 0
        self._broken = 0
        self._open()

    def close(self) -> None:
        """Hang up."""
        self.wire.close()

    def send(self, message: Message) -> None:
        """Publish a row, waiting for others where too many are unanswered.

        :param message: the row
        :raises RowsNotStoredError: so many failed that the rest isn't tried, or the server is away
        """
        index = self.count
        self.count += 1
        size = len(message.header) + len(message.body)
        if message.problem:
            self._fail(index, message, message.problem)
        elif size > self.wire.max_payload:
            limit = self.wire.max_payload
            self._fail(index, message, f"body and headers have more than the {limit} bytes that the server takes")
        else:
            self._rows[index] = message, time.monotonic()
            self._bytes += size
            self._put(index, message)
        if self._failed > _MOST_FAILURES:
            self.settle()
        if len(self._rows) >= self._options.max_in_flight or self._bytes >= _BYTES_IN_FLIGHT:
            # A quarter of the window goes out together.
            self._settle(self._options.max_in_flight * 3 // 4, _BYTES_IN_FLIGHT * 3 // 4)
        elif self._chunk_bytes >= _CHUNK:
            self._carefully(self._flush)

    def settle(self) -> None:
        """Wait until every row is answered.

        :raises RowsNotStoredError: some aren't stored, or nobody knows
        """
        self._settle(0, 0)
        if self._failures:
            raise RowsNotStoredError(self._report())

    def _open(self) -> None:
        self.wire = Wire(wire_settings(self._given), self._inbox)
        stream = re.escape(self._options.stream.encode())
        self._acknowledgement = re.compile(
            rb"MSG %b\.r(\d+) %b \d+\r\n"
            rb'\{"stream": ?"%b", ?"seq": ?\d+(?:, ?"domain": ?"[^"]*")?(, ?"duplicate": ?true)?\}\r\n'
            % (re.escape(self._inbox.encode()), re.escape(self.wire.sid), stream)
        )

    def _put(self, index: int, message: Message) -> None:
        header, body = message.header, message.body
        words = f"HPUB {message.subject} {self._inbox}.r{index} {len(header)} {len(header) + len(body)}\r\n"
        self._chunk += (words.encode(), header, body, b"\r\n")
        self._chunk_bytes += len(header) + len(body)

    def _flush(self) -> None:
        chunk, self._chunk, self._chunk_bytes = self._chunk, [], 0
        if chunk:
            self.wire.send(b"".join(chunk))

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
        self._flush()
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
            if found := self._acknowledgement.match(buffer, at, filled):
                at = found.end()
                self._acknowledged(int(found[1]), duplicate=found[2] is not None)
            elif frame := next_frame(buffer, at, filled):
                at = frame.end
                self._other(frame)
            else:
                break
        self.wire.consume(at)

    def _acknowledged(self, index: int, *, duplicate: bool) -> None:
        if self._taken(index):
            self.stored += 1
            self.duplicates += duplicate
            self._broken = 0

    def _taken(self, index: int) -> Message | None:
        message, _ = self._rows.pop(index, (None, 0.0))
        if message:
            self._bytes -= len(message.header) + len(message.body)
        return message

    def _other(self, frame: Frame) -> None:
        if not frame.sid:
            if refused := _FORBIDDEN_SUBJECT.search(frame.line):
                subject = refused[1].decode(errors="replace")
                for index in [index for index, (message, _) in self._rows.items() if message.subject == subject]:
                    self._refuse(index, f"the server doesn't allow publishing to {subject}")
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
            self._acknowledged(index, duplicate=bool(answer.get("duplicate")))

    def _nobody(self, index: int) -> None:
        message, sent = self._rows[index]
        now = time.monotonic()
        if now - sent > self._options.ack_timeout:
            self._refuse(index, f"no stream stores {message.subject}: {self._options.stream} doesn't, or it is away")
            return
        if not self._absent:
            self._absent_until = now + _PAUSE
        self._absent.append(index)

    def _retry_absent(self, now: float) -> None:
        waiting, self._absent = self._absent, []
        for index in waiting:
            if index in self._rows:
                self._put(index, self._rows[index][0])
        self._absent_until = now + _PAUSE
        self._flush()

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
                self._chunk, self._chunk_bytes, self._absent = [], 0, []
                for index, (message, _) in self._rows.items():
                    self._put(index, message)
                self._flush()
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

    def _refuse(self, index: int, reason: str) -> None:
        if message := self._taken(index):
            self._fail(index, message, reason)

    def _fail(self, index: int, message: Message, reason: str) -> None:
        failed = self._failures.setdefault(reason, _Failed())
        failed.indexes.append(index)
        self._failed += 1
        if len(failed.examples) < _EXAMPLES:
            failed.examples.append(f"{message.subject} {message.message_id}")

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
    spans = ranges(index + 1 for index in sorted(indexes))
    return ", ".join(str(low - 1) if low == high else f"{low - 1}-{high - 1}" for low, high in spans)
