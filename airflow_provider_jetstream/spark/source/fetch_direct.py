"""Reading without a consumer, so that a work queue's workers notice nothing: direct gets of many messages each.

A replica may answer that is behind; what it says to be the end counts only if the stream's leader says so too. The
batches are small because the server locks the stream against publishers for the whole of each.
"""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING

import numpy as np

from airflow_provider_jetstream.jetstream.errors import DeadlineError, UnreachableError, WireError
from airflow_provider_jetstream.spark.source.columns import OWN_HEADERS, TIME_TEXT, constant, integers
from airflow_provider_jetstream.spark.source.gap_detection import Fetched, first_missing
from airflow_provider_jetstream.spark.wire.arrow_buffers import as_text, gather_slices
from airflow_provider_jetstream.spark.wire.bulk_headers import header_column
from airflow_provider_jetstream.spark.wire.bulk_parser import parse
from airflow_provider_jetstream.spark.wire.metadata import DirectGetMetadata, parse_metadata, parse_times

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from airflow_provider_jetstream.spark.source.columns import Columns
    from airflow_provider_jetstream.spark.source.options import ReadOptions
    from airflow_provider_jetstream.spark.source.stream_api import SourceStream
    from airflow_provider_jetstream.spark.wire.bulk_parser import Rows

DEFAULT_BATCH = 256
DEFAULT_MAX_BYTES = 4 << 20
_BURST = 4 << 20
_TAIL = 400
# Parsing more at a time takes less for each, up to about the size of a core's cache.
_ENOUGH = 2 << 20
_STATUS = b"NATS/1.0 "
_END = re.compile(rb"^NATS/1\.0 204 (?:[^\r]*\r\n)+?Nats-Last-Sequence: (\d+)\r\n")
_LAST_WORDS = re.compile(
    rb"\r\nNATS/1\.0 204 EOB\r\n(?:[^\r]*\r\n)*?Nats-Last-Sequence: (\d+)\r\n(?:[^\r]+\r\n)*\r\n\r\n\Z"
)
_REPLICA_PAUSE = 0.05
_SPACE = ord(" ")
_AFTER_VERSION = len(b"NATS/1.0")
_SEQUENCE = b"\r\nNats-Sequence: "


class DirectFetch:
    """Direct gets of a span.

    :param stream: the stream
    :param subject: a filter
    :param columns: what is asked for
    :param options: of the read
    :param bold: whether to ask on before an answer is parsed
    """

    def __init__(
        self, stream: SourceStream, subject: str, columns: Columns, options: ReadOptions, *, bold: bool = True
    ) -> None:
        self._stream = stream
        self._subject = subject
        self._filter = json.dumps(subject).encode()
        self._columns = columns
        self._wire = stream.socket
        self._batch = options.batch or DEFAULT_BATCH
        self._max_bytes = options.max_bytes or DEFAULT_MAX_BYTES
        self._bold = bold

    def fetch(self, first: int, last: int) -> Iterator[Fetched]:
        """Read a span.

        :param first: its first sequence
        :param last: its last sequence
        :return: the messages
        """
        next_one = asked = first
        waiting, patience = False, time.monotonic() + self._wire.timeout
        taken: list[bytes] = []
        while next_one <= last:
            if not waiting:
                self._ask(asked, last)
                waiting = True
            self._wire.receive(_complete)
            if self._bold and (end := self._end_in_sight()):
                # The next answer can come while this one waits to be parsed with others: one alone is too small.
                taken.append(end[1])
                waiting, asked = False, int(end[1]) + 1
                if asked <= last:
                    self._ask(asked, last)
                    waiting = True
                    if self._wire.filled < _ENOUGH:
                        continue
            fetched, ends = self._parsed(next_one, last)
            if [found[1] for end in ends[: len(taken)] if (found := _END.search(end))] != taken:
                raise WireError(f"a message of {self._stream.name} ends like an answer of the server")
            if fetched:
                patience = time.monotonic() + self._wire.timeout
                next_one = fetched.following
                yield fetched
            for end_of_answer in ends[len(taken) :]:
                waiting = False
                if not self._goes_on(end_of_answer, next_one, last, patience):
                    return
            taken, asked = [], next_one

    def _goes_on(self, end: bytes, next_one: int, last: int, patience: float) -> bool:
        """Tell whether there is more after an answer's last words."""
        if end.startswith(b"NATS/1.0 404"):
            found = self._stream.next_message(next_one, self._subject)
            if found is None or found.sequence > last:
                return False
            if time.monotonic() > patience:
                raise DeadlineError(f"no replica gives message {found.sequence} of {self._stream.name}")
            time.sleep(_REPLICA_PAUSE)
        elif not end.startswith(b"NATS/1.0 204"):
            words = end.split(b"\r\n", 1)[0].decode(errors="replace")
            raise UnreachableError(f"no direct get from {self._stream.name}: {words}")
        return True

    def _end_in_sight(self) -> re.Match[bytes] | None:
        """Look for an answer's last words at the end of what came; a message may end like them, so this is checked."""
        filled = self._wire.filled
        return _LAST_WORDS.search(bytes(self._wire.buffer[max(0, filled - _TAIL) : filled]))

    def _ask(self, first: int, last: int) -> None:
        batch = min(self._batch, last - first + 1)
        body = b'{"seq":%d,"next_by_subj":%b,"batch":%d,"max_bytes":%d}' % (first, self._filter, batch, self._max_bytes)
        subject = f"{self._stream.api_prefix}.DIRECT.GET.{self._stream.name}"
        self._wire.send(b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), self._wire.reply().encode(), len(body), body))

    def _parsed(self, next_one: int, last: int) -> tuple[Fetched | None, list[bytes]]:
        """Take what came apart: the messages, and the last words of each answer that ended."""
        wire = self._wire
        parsed = parse(wire.buffer, wire.filled, wire.sid)
        for frame in parsed.others:
            wire.answer(frame)
        rows, ends = self._messages(parsed.rows)
        fetched = None
        if len(rows.end):
            found = parse_metadata(wire.buffer, rows.header, rows.body)
            sequences = found.sequences
            if sequences[0] < next_one or (sequences[1:] <= sequences[:-1]).any():
                raise WireError(f"expected messages of {self._stream.name} in order, found them out of order")
            wanted = slice(int(np.searchsorted(sequences, last, "right")))
            batch = self._batch_of(rows.where(wanted), DirectGetMetadata(*(part[wanted] for part in found)))
            fetched = Fetched(batch, int(sequences[-1]) + 1, first_missing(next_one, sequences))
        wire.consume(parsed.end)
        return fetched, ends

    def _batch_of(self, rows: Rows, found: DirectGetMetadata) -> pa.RecordBatch:
        buffer, count = self._wire.buffer, len(rows.end)
        return self._columns.batch(
            count,
            {
                "value": lambda: gather_slices(buffer, rows.body, rows.end),
                "subject": lambda: as_text(gather_slices(buffer, found.subject, found.subject_end)),
                "stream": lambda: constant(self._stream.name, count),
                "seq": lambda: integers(found.sequences),
                "timestamp": lambda: parse_times(buffer, found),
                "headers": lambda: header_column(buffer, rows.header, found.own_end),
                TIME_TEXT: lambda: as_text(gather_slices(buffer, found.time, found.time_end + 1)),
                OWN_HEADERS: lambda: gather_slices(buffer, rows.header, found.own_end),
            },
        )

    def _messages(self, rows: Rows) -> tuple[Rows, list[bytes]]:
        """Set the words apart that answers end with; what is left are messages."""
        buffer = self._wire.buffer
        data = np.frombuffer(buffer, np.uint8, self._wire.filled)
        # A message may itself have been stored with a status in its first line: the sequence tells.
        suspects = np.flatnonzero((rows.body == rows.header) | (data[rows.header + _AFTER_VERSION] == _SPACE))
        ended = np.zeros(len(rows.end), np.bool_)
        ends: list[bytes] = []
        for at in suspects.tolist():
            header = bytes(buffer[int(rows.header[at]) : int(rows.body[at])])
            if _SEQUENCE not in header:
                ended[at] = True
                ends += [header] if header else []
        return (rows.where(~ended) if ended.any() else rows), ends


def _complete(buffer: bytearray, filled: int) -> bool:
    """Guess whether the answer has ended; a wrong guess costs time and nothing else."""
    return filled >= _BURST or buffer.rfind(b"\r\n" + _STATUS, max(0, filled - _TAIL), filled) >= 0
