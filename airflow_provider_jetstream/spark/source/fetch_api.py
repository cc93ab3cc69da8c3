"""Reading where direct gets are off or the server doesn't support batches: pipelined single gets.

Each request is for the first message at or after a sequence, so that a gap costs at most one round of requests however
wide it is; where most requests of a round return the same message, the next round is narrower.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from airflow_provider_jetstream.jetstream.client.message import NO_MESSAGE
from airflow_provider_jetstream.jetstream.client.wire import encode_message
from airflow_provider_jetstream.jetstream.errors import ApiError
from airflow_provider_jetstream.spark.source.columns import SIZE, FetchedBatch, first_missing
from airflow_provider_jetstream.spark.source.source_stream import parse_time
from airflow_provider_jetstream.spark.wire.arrow_buffers import constant_column
from airflow_provider_jetstream.spark.wire.bulk_headers import HEADERS, parse_header_block

if TYPE_CHECKING:
    from collections.abc import Generator

    from airflow_provider_jetstream.spark.source.columns import RequestedColumns
    from airflow_provider_jetstream.spark.source.options import ReadOptions
    from airflow_provider_jetstream.spark.source.source_stream import SourceStream

_FIRST_WIDTH = 32
# The server drops its whole queue of API requests at ten thousand.
DEFAULT_BATCH = 256
DEFAULT_MAX_BYTES = 4 << 20
_BASE64 = 4 / 3


class _Message(NamedTuple):
    sequence: int
    subject: str
    # Nanoseconds since 1970.
    time: int
    header: bytes
    body: bytes


class ApiFetch:
    """Pipelined single gets of one filter subject."""

    def __init__(self, stream: SourceStream, subject: str, columns: RequestedColumns, options: ReadOptions) -> None:
        self._stream = stream
        self._subject = subject
        self._columns = columns
        self._widest = min(options.fetch_batch or DEFAULT_BATCH, DEFAULT_BATCH)
        self._max_bytes = options.fetch_max_bytes or DEFAULT_MAX_BYTES
        self._api_subject = f"STREAM.MSG.GET.{stream.name}"

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
        socket, stream = self._stream.socket, self._stream
        requests: list[bytes] = []
        indexes: dict[bytes, int] = {}
        target = f"{stream.api_prefix}.{self._api_subject}".encode()
        for index in range(width):
            body = json.dumps({"seq": first + index, "next_by_subj": self._subject}).encode()
            reply = socket.new_reply_subject().encode()
            indexes[reply] = index
            requests.append(encode_message(target, body, reply=reply))
        socket.send(b"".join(requests))
        answers: list[_Message | None] = [None] * width
        while indexes:
            socket.receive(lambda _buffer, _filled: True)
            position = 0
            while frame := socket.next_frame(position):
                position = frame.end
                subject, subject_end, _, _, header, body_start, end = frame.offsets
                if not frame.sid:
                    socket.handle_control(frame)
                elif (index := indexes.pop(bytes(socket.buffer[subject:subject_end]), -1)) >= 0:
                    answers[index] = self._message(
                        bytes(socket.buffer[header:body_start]), bytes(socket.buffer[body_start:end])
                    )
            socket.consume(position)
        return answers

    def _message(self, header: bytes, body: bytes) -> _Message | None:
        try:
            message = self._stream.decode(self._api_subject, header, body)["message"]
        except ApiError as error:
            if error.err_code == NO_MESSAGE:
                return None
            raise
        return _Message(
            int(message["seq"]),
            str(message["subject"]),
            parse_time(str(message["time"])),
            base64.b64decode(message.get("hdrs", "")),
            base64.b64decode(message.get("data", "")),
        )

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
