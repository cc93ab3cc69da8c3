"""Publishes one task's rows: many in flight at a time, and every one acknowledged before the task ends.

The server drops a message whose ``Nats-Msg-Id`` it remembers, whatever that id was used for before. An id of a column
can be computed by others, and so can one that is made with ``msgIdPrefix``; whoever may publish to the stream can use
it first. So a duplicate is believed only if what is stored has the row's subject, headers and body.

nats-server 2.15.0 compares the expected sequence before the message id (2.10.27 doesn't): what a task, or a connection
that broke, has stored itself is refused when it is sent again, and not acknowledged as a duplicate. Then the next
message is compared with the row.
"""

from __future__ import annotations

import logging
import re
import time
from base64 import urlsafe_b64encode
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import numpy as np

from airflow_provider_jetstream.jetstream.archive import ArchiveReader
from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently, sleep
from airflow_provider_jetstream.jetstream.client.headers import NO_RESPONDERS, parse_headers
from airflow_provider_jetstream.jetstream.client.publish_ack import parse_publish_ack, publish_ack_frame
from airflow_provider_jetstream.jetstream.client.stream_api import list_streams, stream_info
from airflow_provider_jetstream.jetstream.client.streams import Streams, next_message
from airflow_provider_jetstream.jetstream.client.wire import encode_message
from airflow_provider_jetstream.jetstream.client.wire_text import decode_text, encode_text
from airflow_provider_jetstream.jetstream.contract import MSG_ID, archive_filter
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    DeadlineError,
    JetStreamProviderError,
    PermissionDeniedError,
    TransientError,
    UnreachableError,
)
from airflow_provider_jetstream.jetstream.publishing.refusals import is_full, is_passing
from airflow_provider_jetstream.jetstream.publishing.report import sequence_ranges
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.errors import RowsNotStoredError
from airflow_provider_jetstream.spark.source.row_encoder import PublishBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
    from typing import Any, TypeVar

    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.client.wire import Frame
    from airflow_provider_jetstream.spark.source.options import WriteOptions
    from airflow_provider_jetstream.spark.source.row_encoder import EncodedRows

    _Result = TypeVar("_Result")


log = logging.getLogger(__name__)

WRONG_LAST_SEQUENCE: Final = 10071

_EXPECTED = re.compile(rb"\r\nNats-Expected-Last-(?:Subject-)?Sequence:[ \t]*(\d{1,19})[ \t]*(?=\r\n)", re.IGNORECASE)
_ID_LINE = b"\r\n" + MSG_ID.encode() + b": "
# The bytes of answers that may arrive together, and the number of requests beyond which reads get no faster.
_BYTES_TOGETHER = 64 << 20
_TOGETHER = 64
# The archive stores a copy a moment after the stream has stored the message.
_ARCHIVE_DELAYS = (0.0, 0.2)
# The number of taken ids after which one is made at random, which a retry can't make again.
_MOST_IDS = 8
_DIGEST = 18
_SCHEDULE, _ROLLUP, _TRACE, _STREAM = "Nats-Schedule", ("Nats-Rollup", "sub"), "ats-trace-dest", "ats-expected-stream"


class Row:
    """A row's message as it is on the wire.

    :param frame: the frame that publishes it
    """

    def __init__(self, frame: bytes) -> None:
        self.frame = frame
        line, _, self._message = frame.partition(b"\r\n")
        _, self.subject, _, size, _ = line.split(b" ")
        self._header_size = int(size)

    @property
    def size(self) -> int:
        """The bytes of its headers and its body."""
        return len(self._message) - 2

    @property
    def header(self) -> bytes:
        """The headers of the row as they are sent, with their first line."""
        return self._message[: self._header_size]

    @property
    def body(self) -> bytes:
        """Its body."""
        return self._message[self._header_size : -2]

    def is_stored_as(self, message: StoredMessage, *, is_transformed: bool) -> bool:
        """Return whether a stored message is this row.

        :param is_transformed: whether the stream stores messages under other subjects
        """
        if message.data != self.body or not (is_transformed or message.subject == decode_text(self.subject)):
            return False
        # As nearly all are, at a fifth of the cost of parsing them.
        lines = "".join([f"{name}: {value}\r\n" for name, value in message.headers])
        if encode_text(f"NATS/1.0\r\n{lines}\r\n") == self.header:
            return True
        own, stored = _compared(parse_headers(self.header)), _compared(message.headers)
        # The server adds to a schedule that it replaces another one on its subject.
        is_schedule = any(name == _SCHEDULE for name, _ in own) and _ROLLUP not in own
        return own == ([pair for pair in stored if pair != _ROLLUP] if is_schedule else stored)

    def with_other_id(self, reply: bytes, tries: int) -> Row:
        """Return the row with another message id, which is the same whenever the row is written.

        :param reply: the subject for the answer
        :param tries: how many ids were taken
        """
        start = self.header.index(_ID_LINE) + len(_ID_LINE)
        message_id, _, rest = self.header[start:].partition(b"\r\n")
        digest = blake2b(b"\n".join([self.subject, self._message]), digest_size=_DIGEST).digest()
        suffix = urlsafe_b64encode(digest) if tries <= _MOST_IDS else uuid4().hex.encode()
        # In place of the last one, so that ids don't grow.
        first = message_id if tries == 1 else message_id.rpartition(b":")[0]
        header = b"%b%b:%b\r\n%b" % (self.header[:start], first, suffix, rest)
        return Row(encode_message(self.subject, self.body, header, reply))


def _compared(headers: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    # The server disables the trace of what it stores, by this header's first letter or by its value. The stream isn't
    # named where it has an archive.
    return [pair for pair in headers if pair[0].lower()[1:] not in (_TRACE, _STREAM)]


class StoredRows:
    """Looks rows up in their stream, over a connection of its own, opened for the first row.

    :param raw_options: the data source's options, from which the connection is made
    """

    def __init__(self, raw_options: Mapping[str, str], stream: str) -> None:
        self._raw_options = raw_options
        self._name = stream
        self._connection: BlockingConnection | None = None
        self._info: dict[str, Any] = {}
        self._is_denied = False

    def close(self) -> None:
        """Close the connection; the next row opens another one."""
        if self._connection:
            self._connection.socket.close()
            self._connection = None

    def is_stored(self, row: Row, message: StoredMessage) -> bool:
        """Return whether a message of the stream is a row."""
        return row.is_stored_as(message, is_transformed="subject_transform" in self._info.get("config", {}))

    def finds(self, row: Row) -> bool:
        """Return whether the message that follows the sequences which a row expects is that row.

        :raises TransientError: there is no answer at the moment
        """
        expected = [int(number) for number in _EXPECTED.findall(row.header)]
        if not expected:
            return False

        async def find(connection: BlockingConnection) -> StoredMessage | None:
            return await next_message(connection, self._name, max(expected) + 1, decode_text(row.subject))

        message = self._run(find)
        return message is not None and self.is_stored(row, message)

    def messages(self, sequences: Collection[int]) -> dict[int, StoredMessage]:
        """Read messages by their sequences; omits messages that are gone, or that the user may not read.

        :raises TransientError: there is no answer at the moment
        """
        found: dict[int, StoredMessage] = {}
        wanted = sorted({*sequences})

        async def read_all(connection: BlockingConnection) -> None:
            step = max(1, min(_TOGETHER, _BYTES_TOGETHER // connection.max_payload))
            for start in range(0, len(wanted), step):
                read = await Streams(connection).get_many(self._name, wanted[start : start + step])
                found.update({sequence: message for sequence, message in read.items() if message})

        self._run(read_all)
        return found

    def archived(self, sequences: Collection[int]) -> dict[int, StoredMessage]:
        """Read messages that are gone from the stream's archive, if it has one; omits those without a copy.

        :raises TransientError: there is no answer at the moment
        """
        found: dict[int, StoredMessage] = {}

        async def read(connection: BlockingConnection) -> None:
            subjects = archive_filter(self._name)
            if (self._info["config"].get("republish") or {}).get("dest") != subjects:
                return
            for delay in _ARCHIVE_DELAYS:
                await sleep(delay)
                missing = sorted({*sequences} - {*found})
                for info in await list_streams(connection, subjects) if missing else ():
                    archive = ArchiveReader.from_info(connection, info, self._info)
                    copies = await map_concurrently(archive.find, missing)
                    found.update({copy.sequence: copy for copy in copies if copy})

        if sequences:
            self._run(read)
        return found

    def _run(self, read: Callable[[BlockingConnection], Coroutine[Any, Any, _Result]]) -> _Result | None:
        async def run(connection: BlockingConnection) -> _Result:
            self._info = self._info or await stream_info(connection, self._name)
            return await read(connection)

        if self._is_denied:
            return None
        try:
            self._connection = self._connection or BlockingConnection(NatsSocket(socket_settings(self._raw_options)))
            return self._connection.run(run(self._connection))
        except TransientError:
            raise
        except JetStreamProviderError as error:
            # What the user may not read isn't known.
            self._is_denied |= isinstance(error, PermissionDeniedError)
            log.warning("What %s holds under the message ids of rows isn't known: %s", self._name, error)
            return None


# The task gives up, and Spark decides, after this many connections in a row that brought no acknowledgement.
_ATTEMPTS = 5
_PAUSE = 0.25
_CHUNK = 1 << 17
_BYTES_IN_FLIGHT = 32 << 20
# With more refused rows than this, the remaining rows aren't tried.
_MOST_FAILURES = 1000
_EXAMPLES = 5
# The row's number, and how many message ids of it were taken.
_REPLY = re.compile(rb"r(\d{1,18})(?:-(\d{1,9}))?")
_FORBIDDEN_SUBJECT = re.compile(rb'Permissions Violation for Publish to "([^"]+)"', re.IGNORECASE)


@dataclass
class _Failure:
    indexes: list[int] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)


class Publisher:
    """Publishes rows and counts their acknowledgements.

    :param raw_options: the data source's options, from which the connection is made
    :param options: the same ones, parsed
    :param partition_name: names the rows' partition in errors
    :param refused: gets the message ids of rows that aren't stored, and why, by the rows' numbers; without it such rows
        are an error
    """

    def __init__(
        self,
        raw_options: Mapping[str, str],
        options: WriteOptions,
        partition_name: str,
        refused: dict[int, tuple[str, str]] | None = None,
    ) -> None:
        self.count = 0
        self.stored = 0
        self.duplicates = 0
        self._raw_options = raw_options
        self._options = options
        self._partition_name = partition_name
        self._refused = refused
        self._inbox = f"{socket_settings(raw_options).inbox_prefix}.{uuid4().hex}"
        self._reply_prefix = f"{self._inbox}.r".encode()
        # Rows without an acknowledgement, in order, with their sizes; and the batches that they belong to.
        self._in_flight: dict[int, int] = {}
        self._batches: list[PublishBatch] = []
        self._bytes_in_flight = 0
        # A quarter of the window is sent together.
        self._chunk_rows = max(1, options.max_in_flight // 4)
        # Rows for which no stream was listening, since when, and when they are retried.
        self._unanswered: list[int] = []
        self._unanswered_since: dict[int, float] = {}
        self._retry_at = 0.0
        self._failures: dict[str, _Failure] = {}
        self._failed = 0
        self._may_pass = False
        self._reconnects = 0
        # By row number: the sequence of what the server has in place of a row that it dropped as a duplicate; and the
        # frame of a row whose message ids others have taken, with the number of these ids.
        self._repeated: dict[int, int] = {}
        self._renamed: dict[int, tuple[bytes, int]] = {}
        self._lookup = StoredRows(raw_options, options.stream)
        self._open()

    def close(self) -> None:
        """Close the connections."""
        self.socket.close()
        self._lookup.close()

    def send(self, rows: EncodedRows) -> None:
        """Publish rows, waiting for acknowledgements where too many rows are in flight.

        :raises RowsNotStoredError: so many failed that the remaining rows aren't tried, or the server is away
        """
        batch = PublishBatch.from_rows(rows, self.count, self._reply_prefix)
        self._batches = [*(held for held in self._batches if held.end > self.settled), batch]
        sizes: dict[int, int] = dict(zip(range(self.count, batch.end), rows.sizes.tolist(), strict=True))
        self.count = batch.end
        problems = {batch.start + row: problem for row, problem in rows.problems.items()}
        for row in np.flatnonzero(rows.sizes > self.socket.max_payload).tolist():
            problems.setdefault(batch.start + row, self._too_large())
        for index in sorted(problems):
            del sizes[index]
            self._fail(index, problems[index])
        for first, end in batch.chunks(sorted(problems), self._chunk_rows, _CHUNK):
            self._wait_until(self._options.max_in_flight - (end - first), _BYTES_IN_FLIGHT)
            if self._failed > _MOST_FAILURES:
                self.count = first
                self.wait_for_all()
            for index in range(first, end):
                self._in_flight[index] = sizes[index]
                self._bytes_in_flight += sizes[index]
            self._with_reconnect(partial(self._send, batch.frames(first, end)))
        if self._failed > _MOST_FAILURES:
            self.wait_for_all()

    def wait_for_all(self) -> None:
        """Wait until every row is acknowledged or refused.

        :raises RowsNotStoredError: some aren't known to be stored
        """
        self._wait_until(0, 0)
        if self._failures:
            raise RowsNotStoredError(self._report(), may_pass=self._may_pass)

    @property
    def settled(self) -> int:
        """The number of the first row that is neither stored nor refused."""
        return next(iter(self._in_flight), self.count)

    def _open(self) -> None:
        self.socket = NatsSocket(socket_settings(self._raw_options), self._inbox)
        self._acknowledgement, self._acknowledgements = self._patterns(duplicates=False)
        self._duplicate, self._duplicates = self._patterns(duplicates=True)

    def _patterns(self, *, duplicates: bool) -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
        frame = publish_ack_frame(self._reply_prefix, self.socket.sid, self._options.stream, duplicates=duplicates)
        # Atomic: what was matched is never matched again. A possessive repeat goes wrong before Python 3.11.5.
        return re.compile(frame), re.compile(rb"(?>(?:%b)*)" % frame)

    def _send(self, frames: memoryview) -> None:
        self.socket.send(frames)

    def _batch_with(self, index: int) -> PublishBatch:
        return next(batch for batch in self._batches if index < batch.end)

    def _frame(self, index: int) -> bytes | memoryview:
        renamed = self._renamed.get(index)
        return renamed[0] if renamed else self._batch_with(index).frames(index, index + 1)

    def _send_again(self, indexes: Iterable[int]) -> None:
        self.socket.send(b"".join(map(self._frame, indexes)))

    def _wait_until(self, rows: int, size: int) -> None:
        """Read acknowledgements until no more than these numbers of rows and bytes are in flight."""
        while len(self._in_flight) > rows or self._bytes_in_flight > size:
            is_due = len(self._repeated) >= min(self._chunk_rows, len(self._in_flight))
            self._with_reconnect(self._verify_repeated if is_due else self._read_answers)

    def _with_reconnect(self, step: Callable[[], None]) -> None:
        try:
            step()
        except TransientError as error:
            self._reconnect(error)
        except RowsNotStoredError:
            raise
        except JetStreamProviderError as error:
            self._give_up(error)

    def _read_answers(self) -> None:
        now = time.monotonic()
        if self._unanswered and now >= self._retry_at:
            self._retry_unanswered(now)
        wait = min(self._options.ack_timeout, self._retry_at - now) if self._unanswered else self._options.ack_timeout
        try:
            self.socket.receive(lambda _buffer, _filled: True, wait)
        except DeadlineError:
            if not self._unanswered:
                raise
        buffer, filled, position = self.socket.buffer, self.socket.filled, 0
        while True:
            match = self._acknowledgements.match(buffer, position, filled)
            if match and match.end() > position:
                self._acknowledge(
                    [int(index) for index, _ in self._acknowledgement.findall(buffer, position, match.end())]
                )
                position = match.end()
            match = self._duplicates.match(buffer, position, filled)
            if match and match.end() > position:
                for index, sequence in self._duplicate.findall(buffer, position, match.end()):
                    self._note_repeated(int(index), int(sequence), tries=0)
                position = match.end()
            if frame := self.socket.next_frame(position):
                position = frame.end
                self._handle_frame(frame)
            else:
                break
        self.socket.consume(position)

    def _acknowledge(self, indexes: Iterable[int]) -> int:
        """Count rows as stored, and return how many of them weren't yet."""
        before = self.stored
        for index in indexes:
            if self._remove(index):
                self.stored += 1
        if self.stored > before:
            self._reconnects = 0
        return self.stored - before

    def _note_repeated(self, index: int, sequence: int, tries: int) -> None:
        # A late answer may be about an id that is known to be taken.
        if index in self._in_flight and tries == self._tries(index):
            self._repeated[index] = sequence

    def _verify_repeated(self) -> None:
        """Compare rows that the server dropped as duplicates with what it has under their ids; count the stored ones.

        What is stored is a row if it has the row's subject, headers and body. Somebody else's message has taken the
        row's id, and the row is sent under another one. Where nothing is stored any more, an id that nobody else can
        compute was the row's; with another id it isn't known, and the row fails.
        """
        found = self._lookup.messages(self._repeated.values())
        gone = [index for index, sequence in self._repeated.items() if sequence not in found]
        guessable = [index for index in gone if self._batch_with(index).has_guessable_id(index)]
        found |= self._lookup.archived({self._repeated[index] for index in guessable})
        repeated, self._repeated = self._repeated, {}
        taken: list[int] = []
        for index, sequence in repeated.items():
            message = found.get(sequence)
            if message is not None and not self._lookup.is_stored(Row(bytes(self._frame(index))), message):
                taken.append(index)
            elif message is not None or not self._batch_with(index).has_guessable_id(index):
                self.duplicates += self._acknowledge([index])
            elif self._remove(index):
                self._count_failure(
                    index,
                    "the stream has stored something under their message ids, and nothing tells what it was: it is"
                    f" gone, or the user may not publish to $JS.API.STREAM.MSG.GET.{self._options.stream}",
                )
        if taken:
            log.warning(
                "%d rows of %s have message ids that somebody else has taken, such as that of sequence %d of %s: they"
                " are sent under other ids; see who else publishes there, or whether rows with one msg_id differ",
                *(len(taken), self._partition_name, repeated[taken[0]], self._options.stream),
            )
            self._send_under_other_ids(taken)

    def _send_under_other_ids(self, indexes: Iterable[int]) -> None:
        for index in indexes:
            tries = self._tries(index) + 1
            reply = b"%b%d-%d" % (self._reply_prefix, index, tries)
            row = Row(bytes(self._frame(index))).with_other_id(reply, tries)
            self._renamed[index] = row.frame, tries
            if row.size > self.socket.max_payload:
                self._refuse(index, self._too_large())
        self._send_again(index for index in indexes if index in self._in_flight)

    def _tries(self, index: int) -> int:
        return self._renamed[index][1] if index in self._renamed else 0

    def _remove(self, index: int) -> bool:
        """Remove a row from those in flight; return whether it was among them."""
        size = self._in_flight.pop(index, None)
        if self._repeated:
            self._repeated.pop(index, None)
        if self._renamed:
            self._renamed.pop(index, None)
        self._bytes_in_flight -= size or 0
        return size is not None

    def _handle_frame(self, frame: Frame) -> None:
        if not frame.sid:
            if refusal := _FORBIDDEN_SUBJECT.search(frame.line):
                subject = refusal[1]
                for index in [index for index in self._in_flight if self._batch_with(index).subject(index) == subject]:
                    self._refuse(index, f"the server doesn't allow publishing to {subject.decode()}")
                return
            self.socket.handle_control(frame)
            return
        subject_start, subject_end, _, _, header, body, end = frame.offsets
        reply = _REPLY.fullmatch(bytes(self.socket.buffer[subject_start:subject_end]).rpartition(b".")[2])
        index, tries = (int(reply[1]), int(reply[2] or 0)) if reply else (-1, 0)
        # A late answer may be about an id that is known to be taken.
        if index not in self._in_flight or tries != self._tries(index):
            return
        if self.socket.buffer[header:body].startswith(NO_RESPONDERS):
            self._handle_no_responders(index)
            return
        self._handle_answer(index, bytes(self.socket.buffer[body:end]))

    def _handle_answer(self, index: int, body: bytes) -> None:
        try:
            ack = parse_publish_ack("", body)
        except ApiError as error:
            if error.err_code == WRONG_LAST_SEQUENCE and self._lookup.finds(Row(bytes(self._frame(index)))):
                self.duplicates += self._acknowledge([index])
                return
            self._refuse(
                index, f"{error.description} (error {error.err_code})", may_pass=is_full(error) or is_passing(error)
            )
        except UnreachableError:
            # Another subscriber to the subject has answered; the stream's own answer may still come.
            return
        else:
            if ack.stream == self._options.stream and ack.duplicate:
                self._note_repeated(index, ack.sequence, tries=self._tries(index))
            elif ack.stream == self._options.stream:
                self._acknowledge([index])

    def _handle_no_responders(self, index: int) -> None:
        now = time.monotonic()
        if now - self._unanswered_since.setdefault(index, now) > self._options.ack_timeout:
            subject = self._batch_with(index).subject(index).decode()
            reason = f"no stream stores {subject}: {self._options.stream} doesn't, or it is away"
            self._refuse(index, reason, may_pass=True)
            return
        if not self._unanswered:
            self._retry_at = now + _PAUSE
        self._unanswered.append(index)

    def _retry_unanswered(self, now: float) -> None:
        indexes, self._unanswered = self._unanswered, []
        self._retry_at = now + _PAUSE
        self._send_again(index for index in indexes if index in self._in_flight)

    def _reconnect(self, error: JetStreamProviderError) -> None:
        """Open another connection and resend every row in flight: the stream detects duplicates by message id."""
        while True:
            self._reconnects += 1
            if self._reconnects > _ATTEMPTS:
                self._give_up(error)
            self.close()
            time.sleep(_PAUSE * self._reconnects)
            try:
                self._open()
                self._unanswered = []
                # The server closes a connection for a row above its limit, which may have been lowered meanwhile.
                for index in [row for row, size in self._in_flight.items() if size > self.socket.max_payload]:
                    self._refuse(index, self._too_large())
                self._send_again(index for index in self._in_flight if index not in self._repeated)
            except TransientError as another:
                error = another
            except JetStreamProviderError as another:
                self._give_up(another)
            else:
                return

    def _give_up(self, error: JetStreamProviderError) -> None:
        # They may be stored: nobody has refused them.
        for index in list(self._in_flight):
            self._remove(index)
            self._count_failure(index, f"no acknowledgement: {error}")
        self._may_pass = isinstance(error, TransientError)
        raise RowsNotStoredError(self._report(), may_pass=self._may_pass) from None

    def _too_large(self) -> str:
        return f"body and headers have more than the {self.socket.max_payload} bytes that the server takes"

    def _refuse(self, index: int, reason: str, *, may_pass: bool = False) -> None:
        if self._remove(index):
            self._may_pass |= may_pass
            self._fail(index, reason)

    def _fail(self, index: int, reason: str) -> None:
        if self._refused is not None:
            self._refused[index] = self._batch_with(index).message_id(index), reason
        else:
            self._count_failure(index, reason)

    def _count_failure(self, index: int, reason: str) -> None:
        failure = self._failures.setdefault(reason, _Failure())
        failure.indexes.append(index)
        self._failed += 1
        if len(failure.examples) < _EXAMPLES:
            failure.examples.append(self._batch_with(index).row_name(index))

    def _report(self) -> str:
        lines = [
            f"rows {_row_ranges(failure.indexes)}: {reason} (such as {', '.join(failure.examples)})"
            for reason, failure in self._failures.items()
        ]
        if self._failed > _MOST_FAILURES:
            lines.append(f"rows from {self.count} on: not tried after so many failures")
        details = "".join(f"\n  - {line}" for line in lines)
        return (
            f"{self._failed} rows of {self._partition_name}, counted from 0, aren't known to be stored; {self.stored}"
            f" others are. Writing them again with the same ids is safe within the stream's duplicate window.{details}"
        )


def _row_ranges(indexes: list[int]) -> str:
    # Ranges are of sequences, which begin at one.
    spans = sequence_ranges(index + 1 for index in sorted(indexes))
    return ", ".join(str(low - 1) if low == high else f"{low - 1}-{high - 1}" for low, high in spans)
