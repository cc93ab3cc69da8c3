"""The fastest way to read a stream with limits retention: a consumer of its own that nobody acknowledges to.

Three pulls are on their way at a time, each capped in messages and bytes, so that neither side waits for the other
and the server's memory for this connection stays bounded.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np

from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, UnreachableError, WireError
from airflow_provider_jetstream.spark.source.columns import constant, integers, microseconds
from airflow_provider_jetstream.spark.source.gap_detection import Fetched, first_missing
from airflow_provider_jetstream.spark.wire.arrow_buffers import as_text, gather_slices
from airflow_provider_jetstream.spark.wire.bulk_headers import header_column, parse_header_block
from airflow_provider_jetstream.spark.wire.bulk_parser import parse
from airflow_provider_jetstream.spark.wire.metadata import parse_reply_subjects

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from airflow_provider_jetstream.spark.source.columns import Columns
    from airflow_provider_jetstream.spark.source.options import ReadOptions
    from airflow_provider_jetstream.spark.source.stream_api import SourceStream
    from airflow_provider_jetstream.spark.wire.bulk_parser import Rows
    from airflow_provider_jetstream.spark.wire.metadata import DeliveryMetadata

DEFAULT_BATCH = 10_000
DEFAULT_MAX_BYTES = 8 << 20
# With two of them, the server has nothing to do for a while whenever one has ended.
_PULLS = 3
# Parsing more at a time takes less for each, up to about the size of a core's cache.
_BURST = 2 << 20
_OVERHEAD = 1 << 16
_SECOND = 1_000_000_000
_FORGOTTEN_AFTER = 30 * _SECOND
# What a pull ends with when all is well: it has all its messages, or the next one doesn't fit into its bytes.
_ENDED = (b"Batch Completed", b"Message Size Exceeds MaxBytes")


class ConsumerFetch:
    """One consumer's delivery of a span.

    :param stream: the stream
    :param subjects: filters; empty for every subject
    :param columns: what is asked for
    :param options: of the read
    """

    def __init__(self, stream: SourceStream, subjects: tuple[str, ...], columns: Columns, options: ReadOptions) -> None:
        self._stream = stream
        self._subjects = subjects
        self._columns = columns
        self._wire = stream.socket
        self._batch = options.batch or DEFAULT_BATCH
        self._max_bytes = max(options.max_bytes or DEFAULT_MAX_BYTES, self._wire.max_payload + _OVERHEAD)
        self._name = f"spark-{uuid4().hex}"
        self._outstanding = 0
        self._position = 0

    def fetch(self, first: int, last: int) -> Iterator[Fetched]:
        """Read a span.

        :param first: its first sequence
        :param last: its last sequence
        :return: the messages
        """
        pending = self._create(first)
        next_one = first
        try:
            while next_one <= last and pending:
                self._ask(last - next_one + 1)
                self._wire.receive(lambda _buffer, filled: filled >= _BURST)
                if (told := self._batch_that_came(next_one, last)) is not None:
                    fetched, pending = told
                    next_one = fetched.following
                    yield fetched
        finally:
            with suppress(JetStreamProviderError):
                self._stream.api(f"CONSUMER.DELETE.{self._stream.name}.{self._name}")
        # The consumer says that nothing is left; the stream must say so too.
        found = self._stream.next_sequence(next_one, self._subjects or (">",)) if next_one <= last else None
        if found is not None and found <= last:
            raise WireError(f"the consumer ended before message {found} of {self._stream.name}, which is stored")

    def _create(self, first: int) -> int:
        config: dict[str, Any] = {
            "name": self._name,
            "ack_policy": "none",
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": first,
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": _FORGOTTEN_AFTER,
            "headers_only": "value" not in self._columns and "headers" not in self._columns,
        }
        if len(self._subjects) == 1:
            config["filter_subject"] = self._subjects[0]
        elif self._subjects:
            config["filter_subjects"] = list(self._subjects)
        request = {"stream_name": self._stream.name, "config": config}
        answer = self._stream.api(f"CONSUMER.CREATE.{self._stream.name}.{self._name}", request)
        return int(answer["num_pending"])

    def _ask(self, left: int) -> None:
        topic = f"{self._stream.api_prefix}.CONSUMER.MSG.NEXT.{self._stream.name}.{self._name}"
        requests = b""
        while self._outstanding <= (_PULLS - 1) * self._batch and left > self._outstanding:
            count = min(self._batch, left - self._outstanding)
            expires = int(self._wire.timeout * 2 * _SECOND)
            body = json.dumps({"batch": count, "max_bytes": self._max_bytes, "expires": expires}).encode()
            requests += f"PUB {topic} {self._wire.reply()} {len(body)}\r\n".encode() + body + b"\r\n"
            self._outstanding += count
        if requests:
            self._wire.send(requests)

    def _batch_that_came(self, next_one: int, last: int) -> tuple[Fetched, int] | None:
        """Take what came apart: the messages, and how many the consumer has left."""
        wire = self._wire
        parsed = parse(wire.buffer, wire.filled, wire.sid)
        for frame in parsed.others:
            wire.answer(frame)
        rows = parsed.rows
        delivered = rows.reply_end > rows.reply
        if not delivered.all():
            self._statuses(rows.where(~delivered))
            rows = rows.where(delivered)
        result = None
        if len(rows.end):
            told = parse_reply_subjects(wire.buffer, rows.reply, rows.reply_end)
            self._check(told)
            wanted = slice(int(np.searchsorted(told.sequences, last, "right")))
            batch = self._batch_of(rows.where(wanted), told, wanted)
            gap = first_missing(next_one, told.sequences)
            result = Fetched(batch, int(told.sequences[-1]) + 1, gap), told.pending
        wire.consume(parsed.end)
        return result

    def _check(self, told: DeliveryMetadata) -> None:
        expected = np.arange(self._position + 1, self._position + 1 + len(told.positions))
        if (told.positions != expected).any():
            raise WireError(f"expected message {expected[0]} of the consumer, found that the connection skipped some")
        self._position = int(expected[-1])
        self._outstanding -= len(expected)

    def _statuses(self, rows: Rows) -> None:
        for header, body in zip(rows.header.tolist(), rows.body.tolist(), strict=True):
            block = bytes(self._wire.buffer[header:body])
            line = block.split(b"\r\n", 1)[0]
            code = line[len(b"NATS/1.0 ") :][:3]
            if code == b"408" or line.endswith(_ENDED):
                unused = [pair["value"] for pair in parse_header_block(block) if pair["key"] == "Nats-Pending-Messages"]
                self._outstanding -= int(unused[0]) if unused else 0
            elif block:
                # What has no header is an answer of the API.
                raise UnreachableError(f"the consumer on {self._stream.name} ended: {line.decode(errors='replace')}")

    def _batch_of(self, rows: Rows, told: DeliveryMetadata, wanted: slice) -> pa.RecordBatch:
        buffer, count = self._wire.buffer, len(rows.end)
        return self._columns.batch(
            count,
            {
                "value": lambda: gather_slices(buffer, rows.body, rows.end),
                "subject": lambda: as_text(gather_slices(buffer, rows.subject, rows.subject_end)),
                "stream": lambda: constant(self._stream.name, count),
                "seq": lambda: integers(told.sequences[wanted]),
                "timestamp": lambda: microseconds(told.times[wanted] // 1000),
                "headers": lambda: header_column(buffer, rows.header, rows.body),
            },
        )
