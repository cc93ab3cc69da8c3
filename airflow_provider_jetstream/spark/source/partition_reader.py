"""Reads one task's range over one connection, and continues after an interruption where it was."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING

import pyarrow as pa

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.jetstream.errors import TransientError
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.errors import DataLossError
from airflow_provider_jetstream.spark.source.data_loss import find_loss, report_loss
from airflow_provider_jetstream.spark.source.fetch_api import ApiFetch
from airflow_provider_jetstream.spark.source.fetch_consumer import ConsumerFetch, PullSize
from airflow_provider_jetstream.spark.source.fetch_direct import DirectFetch
from airflow_provider_jetstream.spark.source.source_stream import SourceStream, StreamInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from airflow_provider_jetstream.spark.source.columns import FetchedBatch, RequestedColumns
    from airflow_provider_jetstream.spark.source.options import ReadOptions
    from airflow_provider_jetstream.spark.source.partition_planner import Range

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
