"""Reading where direct gets are off or the server doesn't know batches: single gets, many on their way at a time.

Each request asks for the first message at a sequence or after it, so that a gap costs at most one round of requests
however wide it is; where most requests of a round meet the same message, the next round is narrower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from airflow_provider_jetstream.jetstream.client.blocking.parser import next_frame
from airflow_provider_jetstream.jetstream.errors import ApiError
from airflow_provider_jetstream.spark.source.columns import constant
from airflow_provider_jetstream.spark.source.gap_detection import Fetched, first_missing
from airflow_provider_jetstream.spark.wire.bulk_headers import HEADERS, parse_header_block

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow_provider_jetstream.spark.source.columns import Columns
    from airflow_provider_jetstream.spark.source.options import ReadOptions
    from airflow_provider_jetstream.spark.source.stream_api import FetchedMessage, SourceStream

_NO_MESSAGE = 10037
_FIRST_WIDTH = 32
# The server drops its whole queue of API requests at ten thousand.
DEFAULT_BATCH = 256
DEFAULT_MAX_BYTES = 4 << 20
_BASE64 = 4 / 3


class ApiFetch:
    """Single gets of a span.

    :param stream: the stream
    :param subject: a filter
    :param columns: what is asked for
    :param options: of the read
    """

    def __init__(self, stream: SourceStream, subject: str, columns: Columns, options: ReadOptions) -> None:
        self._stream = stream
        self._subject = subject
        self._columns = columns
        self._widest = min(options.batch or DEFAULT_BATCH, DEFAULT_BATCH)
        self._max_bytes = options.max_bytes or DEFAULT_MAX_BYTES
        self._topic = f"STREAM.MSG.GET.{stream.name}"

    def fetch(self, first: int, last: int) -> Iterator[Fetched]:
        """Read a span.

        :param first: its first sequence
        :param last: its last sequence
        :return: the messages
        """
        next_one, width, heaviest = first, min(_FIRST_WIDTH, self._widest), 1
        while next_one <= last:
            answers = self._round(next_one, min(width, last - next_one + 1))
            found = {stored.sequence: stored for stored in answers if stored and stored.sequence <= last}
            final = answers[-1]
            began = next_one
            next_one = last + 1 if final is None else max(next_one + len(answers), final.sequence + 1)
            messages = [found[sequence] for sequence in sorted(found)]
            if messages:
                gap = first_missing(began, np.array(sorted(found)))
                yield Fetched(self._batch_of(messages), next_one, gap)
            heaviest = max([heaviest, *(len(stored.body) + len(stored.header) for stored in messages)])
            width = min(width * 2, self._widest) if len(messages) * 2 >= width else max(width // 4, 1)
            width = max(1, min(width, int(self._max_bytes / (heaviest * _BASE64))))

    def _round(self, first: int, width: int) -> list[FetchedMessage | None]:
        wire, stream = self._stream.socket, self._stream
        requests: list[bytes] = []
        places: dict[bytes, int] = {}
        for index in range(width):
            reply, body = wire.reply().encode(), stream.get_request(first + index, self._subject)
            places[reply] = index
            requests.append(
                b"PUB %b.%b %b %d\r\n%b\r\n"
                % (stream.api_prefix.encode(), self._topic.encode(), reply, len(body), body)
            )
        wire.send(b"".join(requests))
        answers: list[FetchedMessage | None] = [None] * width
        while places:
            wire.receive(lambda _buffer, _filled: True)
            at = 0
            while frame := next_frame(wire.buffer, at, wire.filled):
                at = frame.end
                subject, subject_end, _, _, header, body_start, end = frame.parts
                if not frame.sid:
                    wire.answer(frame)
                elif (index := places.pop(bytes(wire.buffer[subject:subject_end]), -1)) >= 0:
                    answers[index] = self._stored(
                        bytes(wire.buffer[header:body_start]), bytes(wire.buffer[body_start:end])
                    )
            wire.consume(at)
        return answers

    def _stored(self, header: bytes, body: bytes) -> FetchedMessage | None:
        try:
            return self._stream.stored(self._stream.decoded(self._topic, header, body))
        except ApiError as error:
            if error.err_code == _NO_MESSAGE:
                return None
            raise

    def _batch_of(self, messages: list[FetchedMessage]) -> pa.RecordBatch:
        count = len(messages)
        times = pa.array([stored.time // 1000 for stored in messages], pa.int64())
        return self._columns.batch(
            count,
            {
                "value": lambda: pa.array([stored.body for stored in messages], pa.binary()),
                "subject": lambda: pa.array([stored.subject for stored in messages], pa.string()),
                "stream": lambda: constant(self._stream.name, count),
                "seq": lambda: pa.array([stored.sequence for stored in messages], pa.int64()),
                "timestamp": lambda: times.cast(pa.timestamp("us", "UTC")),
                "headers": lambda: pa.array(
                    [parse_header_block(stored.header.partition(b"\r\n")[2]) for stored in messages], HEADERS
                ),
            },
        )
