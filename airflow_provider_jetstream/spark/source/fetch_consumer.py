"""The fastest way to read a stream with limits retention: an ephemeral consumer without acknowledgements.

Three pull requests are outstanding at a time, each limited in messages and bytes, so that neither side waits for the
other and the server's memory for this connection stays bounded.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np

from airflow_provider_jetstream.jetstream.client.stream_api import pull_request, pull_subject
from airflow_provider_jetstream.jetstream.client.wire import encode_message
from airflow_provider_jetstream.jetstream.errors import (
    DeadlineError,
    JetStreamProviderError,
    UnreachableError,
    WireError,
)
from airflow_provider_jetstream.spark.source.columns import SIZE, FetchedBatch, first_missing
from airflow_provider_jetstream.spark.wire.arrow_buffers import (
    as_text,
    constant_column,
    gather_slices,
    integer_column,
    timestamp_column,
)
from airflow_provider_jetstream.spark.wire.bulk_headers import header_column, parse_header_block, sizes_without_bodies
from airflow_provider_jetstream.spark.wire.bulk_parser import parse
from airflow_provider_jetstream.spark.wire.metadata import parse_reply_subjects

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    import pyarrow as pa

    from airflow_provider_jetstream.spark.source.columns import RequestedColumns
    from airflow_provider_jetstream.spark.source.options import ReadOptions
    from airflow_provider_jetstream.spark.source.source_stream import SourceStream
    from airflow_provider_jetstream.spark.wire.bulk_parser import Rows
    from airflow_provider_jetstream.spark.wire.metadata import DeliveryMetadata

DEFAULT_BATCH = 10_000
DEFAULT_MAX_BYTES = 8 << 20
# With two of them, the server is idle for a while whenever one has ended.
_PULLS = 3
# After a connection without a message; by a few of them, a pull is below any server's limit.
_SHRINK = 8
_LEAST_BYTES = 1 << 14
# Parsing more at a time costs less per message, up to about the size of a core's cache.
_BURST = 2 << 20
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

    A server drops a connection, and all that it had for it, when more waits to be sent than its ``max_pending``, which
    may be less than what a fast read asks for.

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
        self._batch = options.fetch_batch or DEFAULT_BATCH
        self._size = size or PullSize()
        self._pulls = _PULLS if self._size.divisor == 1 else 1
        usual = max(options.fetch_max_bytes or DEFAULT_MAX_BYTES, self._socket.max_payload + _OVERHEAD)
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
                self._socket.receive(lambda _buffer, filled: filled >= _BURST, min(_IDLE, self._socket.timeout))
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
