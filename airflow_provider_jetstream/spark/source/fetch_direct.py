"""Reading without a consumer, which takes nothing from a work queue's workers: direct gets of many messages each.

The replica that answers may be behind; what it reports as the end counts only if the stream's leader confirms it. The
batches are small because the server locks the stream against publishers for the duration of each.
"""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING

import numpy as np

from airflow_provider_jetstream.jetstream.client.wire import encode_message
from airflow_provider_jetstream.jetstream.errors import DeadlineError, UnreachableError, WireError
from airflow_provider_jetstream.spark.source.columns import OWN_HEADERS, SIZE, TIME_TEXT, FetchedBatch, first_missing
from airflow_provider_jetstream.spark.wire.arrow_buffers import (
    as_text,
    constant_column,
    gather_slices,
    integer_column,
)
from airflow_provider_jetstream.spark.wire.bulk_headers import header_column, sizes_of_blocks
from airflow_provider_jetstream.spark.wire.bulk_parser import parse
from airflow_provider_jetstream.spark.wire.metadata import DirectGetMetadata, parse_metadata, parse_times

if TYPE_CHECKING:
    from collections.abc import Generator

    import pyarrow as pa

    from airflow_provider_jetstream.spark.source.columns import RequestedColumns
    from airflow_provider_jetstream.spark.source.options import ReadOptions
    from airflow_provider_jetstream.spark.source.source_stream import SourceStream
    from airflow_provider_jetstream.spark.wire.bulk_parser import Rows

DEFAULT_BATCH = 256
DEFAULT_MAX_BYTES = 4 << 20
_BURST = 4 << 20
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
        self._batch = options.fetch_batch or DEFAULT_BATCH
        self._max_bytes = options.fetch_max_bytes or DEFAULT_MAX_BYTES
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
                TIME_TEXT: lambda: as_text(gather_slices(buffer, metadata.time, metadata.time_end + 1)),
                OWN_HEADERS: lambda: gather_slices(buffer, rows.header, metadata.own_end),
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
    return filled >= _BURST or buffer.rfind(b"\r\n" + _STATUS, max(0, filled - _TAIL), filled) >= 0
