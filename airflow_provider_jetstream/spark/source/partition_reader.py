"""Reads one task's range over one connection by one of three methods, and continues after an interruption.

A consumer without acknowledgements is the fastest, for a stream with limits retention. Direct gets of many messages
take nothing from a work queue's workers. Single gets work on any stream and server.
"""

from __future__ import annotations

import base64
import json
import re
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import numpy as np
import pyarrow as pa

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.jetstream.client.stream_api import pull_request, pull_subject
from airflow_provider_jetstream.jetstream.client.wire import encode_message
from airflow_provider_jetstream.jetstream.errors import (
    DeadlineError,
    JetStreamProviderError,
    TransientError,
    UnreachableError,
    WireError,
)
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.errors import DataLossError
from airflow_provider_jetstream.spark.source.arrow_buffers import (
    as_text,
    constant_column,
    gather_slices,
    integer_column,
    timestamp_column,
)
from airflow_provider_jetstream.spark.source.bulk_parser import (
    HEADERS,
    DirectGetMetadata,
    header_column,
    parse,
    parse_header_block,
    parse_metadata,
    parse_reply_subjects,
    parse_times,
    sizes_of_blocks,
    sizes_without_bodies,
)
from airflow_provider_jetstream.spark.source.columns import SIZE
from airflow_provider_jetstream.spark.source.partition_planner import find_loss, report_loss
from airflow_provider_jetstream.spark.source.source_stream import SourceStream, StreamInfo, parse_time

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from airflow_provider_jetstream.spark.source.bulk_parser import DeliveryMetadata, Rows
    from airflow_provider_jetstream.spark.source.columns import RequestedColumns
    from airflow_provider_jetstream.spark.source.options import ReadOptions
    from airflow_provider_jetstream.spark.source.partition_planner import Range


_FIRST_WIDTH = 32
# The server drops its whole queue of API requests at ten thousand.
_API_BATCH = 256
_API_BYTES = 4 << 20
_BASE64 = 4 / 3


class FetchedBatch(NamedTuple):
    """Messages of a range.

    :param batch: the messages
    :param next_sequence: the sequence at which reading continues
    :param missing: the first sequence before ``next_sequence`` without a message
    """

    batch: pa.RecordBatch
    next_sequence: int
    missing: int | None


def first_missing(expected: int, sequences: NDArray[np.int64]) -> int | None:
    """Return the first gap in ascending sequences that should begin with ``expected``."""
    count = len(sequences)
    if sequences[0] == expected and sequences[-1] == expected + count - 1:
        return None
    return expected + int(np.argmax(sequences != np.arange(expected, expected + count)))


class _Message(NamedTuple):
    sequence: int
    subject: str
    # Nanoseconds since 1970.
    time: int
    header: bytes
    body: bytes


def _message_of(answer: Mapping[str, Any]) -> _Message:
    return _Message(
        int(answer["seq"]),
        str(answer["subject"]),
        parse_time(str(answer["time"])),
        base64.b64decode(answer.get("hdrs", "")),
        base64.b64decode(answer.get("data", "")),
    )


class ApiFetch:
    """Pipelined single gets of one filter subject."""

    def __init__(self, stream: SourceStream, subject: str, columns: RequestedColumns, options: ReadOptions) -> None:
        self._stream = stream
        self._subject = subject
        self._columns = columns
        self._widest = min(options.fetch_batch or _API_BATCH, _API_BATCH)
        self._max_bytes = options.fetch_max_bytes or _API_BYTES

    def fetch(self, first: int, last: int) -> Generator[FetchedBatch]:
        """Read the messages from one sequence to another."""
        position, width, heaviest = first, min(_FIRST_WIDTH, self._widest), 1
        while position <= last:
            answers = self._request_round(position, min(width, last - position + 1))
            by_sequence = {message.sequence: message for message in answers if message and message.sequence <= last}
            final = answers[-1]
            start = position
            position = last + 1 if final is None else max(position + len(answers), final.sequence + 1)
            messages = [by_sequence[sequence] for sequence in sorted(by_sequence)]
            if messages:
                gap = first_missing(start, np.array(sorted(by_sequence)))
                yield FetchedBatch(self._batch_of(messages), position, gap)
            heaviest = max([heaviest, *(len(message.body) + len(message.header) for message in messages)])
            width = min(width * 2, self._widest) if len(messages) * 2 >= width else max(width // 4, 1)
            width = max(1, min(width, int(self._max_bytes / (heaviest * _BASE64))))

    def _request_round(self, first: int, width: int) -> list[_Message | None]:
        requests = [{"seq": first + index, "next_by_subj": self._subject} for index in range(width)]
        return [_message_of(answer) if answer else None for answer in self._stream.get_all(requests)]

    def _batch_of(self, messages: list[_Message]) -> pa.RecordBatch:
        count = len(messages)
        times = pa.array([message.time // 1000 for message in messages], pa.int64())
        return self._columns.batch(
            count,
            {
                "value": lambda: pa.array([message.body for message in messages], pa.binary()),
                "subject": lambda: pa.array([message.subject for message in messages], pa.string()),
                "stream": lambda: constant_column(self._stream.name, count),
                "seq": lambda: pa.array([message.sequence for message in messages], pa.int64()),
                "timestamp": lambda: times.cast(pa.timestamp("us", "UTC")),
                "headers": lambda: pa.array(
                    [parse_header_block(message.header.partition(b"\r\n")[2]) for message in messages], HEADERS
                ),
                SIZE: lambda: pa.array(
                    [len(message.subject.encode()) + len(message.header) + len(message.body) for message in messages],
                    pa.int64(),
                ),
            },
        )


CONSUMER_BATCH = 10_000
_CONSUMER_BYTES = 8 << 20
# Open at once. With two pulls the server is idle for a while whenever one has ended.
_PULLS = 3
# The divisor of a pull's bytes after a connection without a message; a few such steps are below any server's limit.
_SHRINK = 8
_LEAST_BYTES = 1 << 14
# Parsing more at a time costs less per message, up to about the size of a core's cache.
_CONSUMER_BURST = 2 << 20
_OVERHEAD = 1 << 16
_SECOND = 1_000_000_000
_INACTIVE_THRESHOLD = 30 * _SECOND
_ALL = (1 << 63) - 1
# Seconds without a byte after which the stream is looked at.
_IDLE = 1.0
# The statuses that end a pull normally: all its messages came, or the next one doesn't fit into its bytes.
_TOO_BIG = b"Message Size Exceeds MaxBytes"
_ENDED = (b"Batch Completed", _TOO_BIG)


@dataclass
class PullSize:
    """How much a task asks for at a time, over all of its connections.

    A server closes a connection, and drops what it had to send, when more bytes wait there than its ``max_pending``. A
    fast read may ask for more than that.

    :param divisor: of the usual bytes; above one, a pull ends before the next one is sent
    :param undelivered: whether a connection has asked for messages and got none
    """

    divisor: int = 1
    undelivered: bool = False

    def shrink_if_undelivered(self) -> None:
        """Ask for less where the last connection ended without a message."""
        if self.undelivered:
            self.divisor, self.undelivered = self.divisor * _SHRINK, False


class ConsumerFetch:
    """An ephemeral consumer's delivery of some filter subjects; no filter for every subject.

    :param next_sequence: finds the first message at or after a sequence, over another connection than the stream's
    :param size: how much is asked for
    """

    def __init__(
        self,
        stream: SourceStream,
        subjects: tuple[str, ...],
        columns: RequestedColumns,
        options: ReadOptions,
        next_sequence: Callable[[int, Sequence[str]], int | None],
        size: PullSize | None = None,
    ) -> None:
        self._stream = stream
        self._subjects = subjects
        self._columns = columns
        self._next_sequence = next_sequence
        self._socket = stream.socket
        self._batch = options.fetch_batch or CONSUMER_BATCH
        self._size = size or PullSize()
        self._pulls = _PULLS if self._size.divisor == 1 else 1
        usual = max(options.fetch_max_bytes or _CONSUMER_BYTES, self._socket.max_payload + _OVERHEAD)
        self._usual_bytes = max(usual // self._size.divisor, _LEAST_BYTES)
        self._max_bytes = self._usual_bytes
        self._name = f"spark-{uuid4().hex}"
        self._outstanding = 0
        self._delivered = 0

    def fetch(self, first: int, last: int) -> Generator[FetchedBatch]:
        """Read the messages from one sequence to another."""
        pending = self._create(first)
        position = first
        try:
            while position <= last and pending:
                self._pull(last - position + 1)
                if not self._receive(position, last):
                    return
                if (parsed := self._parse(position, last)) is not None:
                    fetched, pending = parsed
                    position = fetched.next_sequence
                    yield fetched
        finally:
            self._delete()
        # The consumer reports that nothing is left; the stream must confirm it.
        unread = self._stream.next_sequence(position, self._subjects or (">",)) if position <= last else None
        if unread is not None and unread <= last:
            raise WireError(f"the consumer ended before message {unread} of {self._stream.name}, which is stored")

    def fetch_latest(self) -> Iterator[FetchedBatch]:
        """Read the last message of each subject, and what is stored until nothing is left."""
        pending = self._create(None)
        position = 1
        try:
            while pending:
                self._pull(_ALL)
                if not self._receive(position, _ALL):
                    return
                if (parsed := self._parse(position, _ALL)) is not None:
                    fetched, pending = parsed
                    position = fetched.next_sequence
                    yield fetched
        finally:
            self._delete()

    def _delete(self) -> None:
        with suppress(JetStreamProviderError):
            self._stream.api(f"CONSUMER.DELETE.{self._stream.name}.{self._name}")

    def _receive(self, position: int, last: int) -> bool:
        """Wait for bytes; return whether there is still something to wait for.

        :raises DeadlineError: no byte came, although messages are stored
        """
        deadline = time.monotonic() + self._socket.timeout
        while True:
            try:
                self._socket.receive(
                    lambda _buffer, filled: filled >= _CONSUMER_BURST, min(_IDLE, self._socket.timeout)
                )
            except DeadlineError:
                # What the consumer has counted as pending may have been purged.
                unread = self._next_sequence(position, self._subjects or (">",))
                if unread is None or unread > last:
                    return False
                if time.monotonic() >= deadline:
                    raise
            else:
                return True

    def _create(self, first: int | None) -> int:
        """Create the consumer, and return how many messages it is to deliver.

        :param first: the first sequence; none for the last message of each subject
        """
        config: dict[str, Any] = {
            "name": self._name,
            "ack_policy": "none",
            "deliver_policy": "by_start_sequence" if first else "last_per_subject",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": _INACTIVE_THRESHOLD,
            "headers_only": "value" not in self._columns and "headers" not in self._columns,
        }
        if first:
            config["opt_start_seq"] = first
        # The server finds the last message of each subject among those of a filter.
        if len(self._subjects) == 1 or not (first or self._subjects):
            config["filter_subject"] = self._subjects[0] if self._subjects else ">"
        elif self._subjects:
            config["filter_subjects"] = list(self._subjects)
        request = {"stream_name": self._stream.name, "config": config}
        answer = self._stream.api(f"CONSUMER.CREATE.{self._stream.name}.{self._name}", request)
        return int(answer["num_pending"])

    def _pull(self, left: int) -> None:
        subject = pull_subject(self._stream.name, self._name, self._stream.api_prefix)
        requests = b""
        while self._outstanding <= (self._pulls - 1) * self._batch and left > self._outstanding:
            count = min(self._batch, left - self._outstanding)
            # Without an end, for which the server would look at its clock before each message; the consumer is deleted.
            body = pull_request(count, max_bytes=self._max_bytes)
            requests += encode_message(subject.encode(), body, reply=self._socket.new_reply_subject().encode())
            self._outstanding += count
        if requests:
            self._size.undelivered = not self._delivered
            self._socket.send(requests)

    def _parse(self, position: int, last: int) -> tuple[FetchedBatch, int] | None:
        """Parse the buffer: the messages, and how many the consumer has left."""
        socket = self._socket
        parsed = parse(socket.buffer, socket.filled, socket.sid)
        for frame in parsed.others:
            socket.handle_control(frame)
        rows = parsed.rows
        delivered = rows.reply_end > rows.reply
        if not delivered.all():
            self._read_statuses(rows.where(~delivered))
            rows = rows.where(delivered)
        result = None
        if len(rows.end):
            self._max_bytes = self._usual_bytes
            self._size.undelivered = False
            metadata = parse_reply_subjects(socket.buffer, rows.reply, rows.reply_end)
            self._check_positions(metadata)
            in_range = slice(int(np.searchsorted(metadata.sequences, last, "right")))
            batch = self._batch_of(rows.where(in_range), metadata, in_range)
            gap = first_missing(position, metadata.sequences)
            result = FetchedBatch(batch, int(metadata.sequences[-1]) + 1, gap), metadata.pending
        socket.consume(parsed.end)
        return result

    def _check_positions(self, metadata: DeliveryMetadata) -> None:
        expected = np.arange(self._delivered + 1, self._delivered + 1 + len(metadata.positions))
        if (metadata.positions != expected).any():
            raise WireError(f"expected message {expected[0]} of the consumer, found that the connection skipped some")
        self._delivered = int(expected[-1])
        self._outstanding -= len(expected)

    def _read_statuses(self, rows: Rows) -> None:
        for header, body in zip(rows.header.tolist(), rows.body.tolist(), strict=True):
            block = bytes(self._socket.buffer[header:body])
            line = block.split(b"\r\n", 1)[0]
            code = line[len(b"NATS/1.0 ") :][:3]
            if code == b"408" or line.endswith(_ENDED):
                unused = {pair["key"]: pair["value"] for pair in parse_header_block(block)}
                self._outstanding -= int(unused.get("Nats-Pending-Messages", 0))
                if line.endswith(_TOO_BIG):
                    self._make_room(int(unused.get("Nats-Pending-Bytes", 0)))
            elif block:
                # A message without a header is an answer of the API.
                raise UnreachableError(f"the consumer on {self._stream.name} ended: {line.decode(errors='replace')}")

    def _make_room(self, unused: int) -> None:
        """Pull more bytes at a time where none of a pull's were used: the next message is larger than all of them.

        It may have been stored when the server's ``max_payload`` was larger than it is now.
        """
        if unused >= self._max_bytes:
            self._max_bytes = 2 * unused

    def _batch_of(self, rows: Rows, metadata: DeliveryMetadata, in_range: slice) -> pa.RecordBatch:
        buffer, count = self._socket.buffer, len(rows.end)
        return self._columns.batch(
            count,
            {
                "value": lambda: gather_slices(buffer, rows.body, rows.end),
                "subject": lambda: as_text(gather_slices(buffer, rows.subject, rows.subject_end)),
                "stream": lambda: constant_column(self._stream.name, count),
                "seq": lambda: integer_column(metadata.sequences[in_range]),
                "timestamp": lambda: timestamp_column(metadata.times[in_range] // 1000),
                "headers": lambda: header_column(buffer, rows.header, rows.body),
                SIZE: lambda: integer_column(
                    sizes_without_bodies(buffer, rows.header, rows.body) + rows.subject_end - rows.subject
                ),
            },
        )


DIRECT_BATCH = 256
_DIRECT_BYTES = 4 << 20
_DIRECT_BURST = 4 << 20
_TAIL = 400
# Parsing more at a time costs less per message, up to about the size of a core's cache.
_ENOUGH = 2 << 20
_STATUS = b"NATS/1.0 "
_END = re.compile(rb"^NATS/1\.0 204 (?:[^\r]*\r\n)+?Nats-Last-Sequence: (\d+)\r\n")
_END_IN_TAIL = re.compile(
    rb"\r\nNATS/1\.0 204 EOB\r\n(?:[^\r]*\r\n)*?Nats-Last-Sequence: (\d+)\r\n(?:[^\r]+\r\n)*\r\n\r\n\Z"
)
_REPLICA_PAUSE = 0.05
_SPACE = ord(" ")
_AFTER_VERSION = len(b"NATS/1.0")
_SEQUENCE = b"\r\nNats-Sequence: "


class DirectFetch:
    """Direct gets of one filter subject.

    :param pipelined: whether to send the next request before the answer to this one is parsed
    """

    def __init__(
        self,
        stream: SourceStream,
        subject: str,
        columns: RequestedColumns,
        options: ReadOptions,
        *,
        pipelined: bool = True,
    ) -> None:
        self._stream = stream
        self._subject = subject
        self._filter = json.dumps(subject).encode()
        self._columns = columns
        self._socket = stream.socket
        self._batch = options.fetch_batch or DIRECT_BATCH
        self._max_bytes = options.fetch_max_bytes or _DIRECT_BYTES
        self._pipelined = pipelined

    def fetch(self, first: int, last: int) -> Generator[FetchedBatch]:
        """Read the messages from one sequence to another."""
        position = requested = first
        waiting, deadline = False, time.monotonic() + self._socket.timeout
        # The last sequences of answers whose end was seen in the buffer, still to be confirmed by the parser.
        expected_ends: list[bytes] = []
        while position <= last:
            if not waiting:
                self._request(requested, last)
                waiting = True
            self._socket.receive(_is_complete)
            if self._pipelined and (end := self._end_in_tail()):
                # The next answer can arrive while this one waits to be parsed with others: one alone is too small.
                expected_ends.append(end[1])
                waiting, requested = False, int(end[1]) + 1
                if requested <= last:
                    self._request(requested, last)
                    waiting = True
                    if self._socket.filled < _ENOUGH:
                        continue
            fetched, ends = self._parse(position, last)
            if [match[1] for end in ends[: len(expected_ends)] if (match := _END.search(end))] != expected_ends:
                raise WireError(f"a message of {self._stream.name} ends like an answer of the server")
            if fetched:
                deadline = time.monotonic() + self._socket.timeout
                position = fetched.next_sequence
                yield fetched
            for status in ends[len(expected_ends) :]:
                waiting = False
                if not self._has_more(status, position, last, deadline):
                    return
            expected_ends, requested = [], position

    def _has_more(self, status: bytes, position: int, last: int, deadline: float) -> bool:
        """Return whether more messages follow after the status that ended an answer."""
        if status.startswith(b"NATS/1.0 404"):
            message = self._stream.next_message(position, self._subject)
            if message is None or message.sequence > last:
                return False
            if time.monotonic() > deadline:
                raise DeadlineError(f"no replica gives message {message.sequence} of {self._stream.name}")
            time.sleep(_REPLICA_PAUSE)
        elif not status.startswith(b"NATS/1.0 204"):
            line = status.split(b"\r\n", 1)[0].decode(errors="replace")
            raise UnreachableError(f"no direct get from {self._stream.name}: {line}")
        return True

    def _end_in_tail(self) -> re.Match[bytes] | None:
        """Find an answer's end in the last bytes received; a message may end the same, so the parser confirms it."""
        filled = self._socket.filled
        return _END_IN_TAIL.search(bytes(self._socket.buffer[max(0, filled - _TAIL) : filled]))

    def _request(self, first: int, last: int) -> None:
        batch = min(self._batch, last - first + 1)
        body = b'{"seq":%d,"next_by_subj":%b,"batch":%d,"max_bytes":%d}' % (first, self._filter, batch, self._max_bytes)
        subject = f"{self._stream.api_prefix}.DIRECT.GET.{self._stream.name}"
        reply = self._socket.new_reply_subject()
        self._socket.send(encode_message(subject.encode(), body, reply=reply.encode()))

    def _parse(self, position: int, last: int) -> tuple[FetchedBatch | None, list[bytes]]:
        """Parse the buffer: the messages, and the status of each answer that ended."""
        socket = self._socket
        parsed = parse(socket.buffer, socket.filled, socket.sid)
        for frame in parsed.others:
            socket.handle_control(frame)
        rows, ends = self._split_statuses(parsed.rows)
        fetched = None
        if len(rows.end):
            metadata = parse_metadata(socket.buffer, rows.header, rows.body)
            sequences = metadata.sequences
            if sequences[0] < position or (sequences[1:] <= sequences[:-1]).any():
                raise WireError(f"expected messages of {self._stream.name} in order, found them out of order")
            in_range = slice(int(np.searchsorted(sequences, last, "right")))
            batch = self._batch_of(rows.where(in_range), DirectGetMetadata(*(column[in_range] for column in metadata)))
            fetched = FetchedBatch(batch, int(sequences[-1]) + 1, first_missing(position, sequences))
        socket.consume(parsed.end)
        return fetched, ends

    def _batch_of(self, rows: Rows, metadata: DirectGetMetadata) -> pa.RecordBatch:
        buffer, count = self._socket.buffer, len(rows.end)
        return self._columns.batch(
            count,
            {
                "value": lambda: gather_slices(buffer, rows.body, rows.end),
                "subject": lambda: as_text(gather_slices(buffer, metadata.subject, metadata.subject_end)),
                "stream": lambda: constant_column(self._stream.name, count),
                "seq": lambda: integer_column(metadata.sequences),
                "timestamp": lambda: parse_times(buffer, metadata),
                "headers": lambda: header_column(buffer, rows.header, metadata.own_end),
                SIZE: lambda: integer_column(
                    rows.end
                    - rows.body
                    + metadata.subject_end
                    - metadata.subject
                    # A publisher's own block ends with one more empty line.
                    + sizes_of_blocks(metadata.own_end - rows.header + len(b"\r\n"))
                ),
            },
        )

    def _split_statuses(self, rows: Rows) -> tuple[Rows, list[bytes]]:
        """Separate the statuses that end answers from the messages."""
        buffer = self._socket.buffer
        data = np.frombuffer(buffer, np.uint8, self._socket.filled)
        # A message may itself have been stored with a status in its first line: only the server's sequence decides.
        suspects = np.flatnonzero((rows.body == rows.header) | (data[rows.header + _AFTER_VERSION] == _SPACE))
        is_status = np.zeros(len(rows.end), np.bool_)
        ends: list[bytes] = []
        for index in suspects.tolist():
            header = bytes(buffer[int(rows.header[index]) : int(rows.body[index])])
            if _SEQUENCE not in header:
                is_status[index] = True
                ends += [header] if header else []
        return (rows.where(~is_status) if is_status.any() else rows), ends


def _is_complete(buffer: bytearray, filled: int) -> bool:
    """Guess whether the answer has ended; a wrong guess costs time and nothing else."""
    return filled >= _DIRECT_BURST or buffer.rfind(b"\r\n" + _STATUS, max(0, filled - _TAIL), filled) >= 0


# The task gives up, and Spark decides, after this many failures without a message between them, or where failures go on
# for longer than the connection's time limit.
_ATTEMPTS = 5
_PAUSE = 0.5
# The size of a batch handed to Spark. Larger batches have to be joined first, which is a copy, and fill the pipe to the
# JVM, so that neither side works while the other does.
_ROWS = 8192
_BYTES = 1 << 19


def read_range(
    raw_options: Mapping[str, str], options: ReadOptions, columns: RequestedColumns, task: Range
) -> Iterator[pa.RecordBatch]:
    """Read a task's range.

    :param raw_options: the data source's options, from which the connection is made
    :param options: the same ones, parsed
    :raises DataLossError: messages are gone, and that is an error
    :raises TransientError: the server was away for too long
    """
    return columns.decoded(_read_subjects_in_turn(raw_options, options, columns, task))


def _read_subjects_in_turn(
    raw_options: Mapping[str, str], options: ReadOptions, columns: RequestedColumns, task: Range
) -> Iterator[pa.RecordBatch]:
    batches: list[pa.RecordBatch] = []
    rows = size = 0
    for subjects in scans(task):
        for batch in _read_subjects(raw_options, options, columns, task, subjects):
            batches.append(batch)
            rows, size = rows + batch.num_rows, size + batch.nbytes
            if rows >= _ROWS or size >= _BYTES:
                yield _joined(batches)
                batches.clear()
                rows = size = 0
    if batches:
        yield _joined(batches)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _read_subjects(
    raw_options: Mapping[str, str],
    options: ReadOptions,
    columns: RequestedColumns,
    task: Range,
    subjects: tuple[str, ...],
) -> Iterator[pa.RecordBatch]:
    position, failures, failing_since = task.first, 0, 0.0
    settings, size = socket_settings(raw_options), PullSize()
    while position <= task.last:
        try:
            with closing(NatsSocket(settings)) as socket, closing(_Observer(raw_options, options, task)) as observer:
                stream = SourceStream(socket, options.stream)
                observer.head = _require_range(stream, options, task, position)
                fetched = fetch(
                    stream,
                    task,
                    subjects,
                    columns,
                    options,
                    observer.next_sequence,
                    first=position,
                    pipelined=not failures,
                    size=size,
                )
                for batch, next_sequence, missing in fetched:
                    if missing is not None:
                        observer.check_loss(missing)
                    position, failures = next_sequence, 0
                    if batch.num_rows:
                        yield batch
                if position <= task.last:
                    observer.check_loss(position)
                return
        except TransientError:
            size.shrink_if_undelivered()
            failures += 1
            failing_since = failing_since if failures > 1 else time.monotonic()
            if failures >= _ATTEMPTS or time.monotonic() - failing_since > settings.timeout:
                raise
            time.sleep(_PAUSE * failures)


def fetch(
    stream: SourceStream,
    task: Range,
    subjects: tuple[str, ...],
    columns: RequestedColumns,
    options: ReadOptions,
    next_sequence: Callable[[int, Sequence[str]], int | None],
    *,
    first: int,
    pipelined: bool = True,
    size: PullSize | None = None,
) -> Generator[FetchedBatch]:
    """Read messages of a range by its method, once, over the stream's connection.

    :param subjects: one filter, or for a consumer all of them
    :param next_sequence: finds the first message at or after a sequence, over another connection
    :param first: the sequence to begin at
    :param pipelined: whether direct gets may be sent before the last one is parsed
    :param size: how much a consumer is asked for
    """
    if task.method == "consumer":
        return ConsumerFetch(stream, subjects, columns, options, next_sequence, size).fetch(first, task.last)
    if task.method == "direct":
        return DirectFetch(stream, subjects[0], columns, options, pipelined=pipelined).fetch(first, task.last)
    return ApiFetch(stream, subjects[0], columns, options).fetch(first, task.last)


def scans(task: Range) -> list[tuple[str, ...]]:
    """Return the filters of each pass over a range: a consumer takes all at once, a get takes one."""
    return [task.subjects] if task.method == "consumer" else [(subject,) for subject in task.subjects or (">",)]


def _require_range(stream: SourceStream, options: ReadOptions, task: Range, first: int) -> int:
    """Report what is lost of a range, and return at which sequence the stream begins."""
    info = stream.info()
    require_same(stream, task.created, info)
    if loss := find_loss(stream, info, first, options.filter_subjects, task.planned, last=task.last):
        report_loss(f"{stream.name} begins at {info.first} now, and {first} was to be read", options, loss)
    return info.first


def require_same(stream: SourceStream, created: str, info: StreamInfo) -> None:
    """Require that a stream is the one that a read was planned for.

    :raises DataLossError: it was created anew since
    """
    if info.created != created:
        raise DataLossError(
            f"expected the stream {stream.name} that was created at {created}, found one created at"
            f" {info.created}: it was deleted and recreated while it was read; read it again"
        )


class _Observer:
    """Looks at the stream over a second connection, which it opens when it is first used.

    :ivar head: where the stream began when that was last looked at
    """

    def __init__(self, raw_options: Mapping[str, str], options: ReadOptions, task: Range) -> None:
        self._raw_options = raw_options
        self._options = options
        self._task = task
        self._watches = task.detect_loss
        self.head = 0
        self._socket: NatsSocket | None = None

    def close(self) -> None:
        if self._socket:
            self._socket.close()

    def next_sequence(self, sequence: int, subjects: Sequence[str]) -> int | None:
        """Find the first message at or after a sequence that any of the filters matches."""
        return self._stream().next_sequence(sequence, subjects)

    def check_loss(self, missing: int) -> None:
        """Report a loss if the stream begins after a sequence that didn't come, and nothing explains it.

        :raises DataLossError: that is so, and it is an error
        """
        if not self._watches:
            return
        stream = self._stream()
        info = stream.info()
        if info.first <= max(missing, self.head):
            return
        # The first sequence of a stream never decreases, and a loss is reported once.
        self.head = info.first
        options, task = self._options, self._task
        if loss := find_loss(stream, info, missing, options.filter_subjects, task.planned, last=task.last):
            report_loss(f"{stream.name} begins at {info.first} now, and {missing} was being read", options, loss)
            self._watches = False

    def _stream(self) -> SourceStream:
        self._socket = self._socket or NatsSocket(socket_settings(self._raw_options))
        return SourceStream(self._socket, self._options.stream)
