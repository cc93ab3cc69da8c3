"""Reads streams as they grow, in batches of bounded size where Spark supports that (4.2 and later).

An offset is the last sequence that was read of each stream, so a batch is the same however often it runs. No server
tells how many bytes a range of sequences has, so a limit of bytes is found by reading sizes.
"""

from __future__ import annotations

import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from pyspark.sql import streaming
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from typing_extensions import override

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.jetstream.errors import TransientError
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.errors import SparkOptionError, with_short_errors
from airflow_provider_jetstream.spark.source.batch_reader import RangePartition
from airflow_provider_jetstream.spark.source.columns import SIZE, RequestedColumns
from airflow_provider_jetstream.spark.source.options import NO_SESSION, read_options
from airflow_provider_jetstream.spark.source.partition_reader import CONSUMER_BATCH, fetch, read_range, scans
from airflow_provider_jetstream.spark.source.partition_reader import CONSUMER_BATCH as DIRECT_BATCH
from airflow_provider_jetstream.spark.source.query import QueryStreams, write_offset
from airflow_provider_jetstream.spark.source.source_stream import SourceStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray
    from pyspark.sql.streaming.datasource import ReadLimit
    from pyspark.sql.types import StructType

    from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
    from airflow_provider_jetstream.spark.source.options import ReadOptions, SessionDefaults
    from airflow_provider_jetstream.spark.source.partition_planner import Range
    from airflow_provider_jetstream.spark.source.query import NewMessages, StreamPosition
    from airflow_provider_jetstream.spark.source.source_stream import StreamInfo

    Integers = NDArray[np.int64]


_SEQUENCE = "seq"
_COLUMNS = RequestedColumns((_SEQUENCE, SIZE), (True, True))
_FEWEST_MESSAGES = 50


class BytesUpTo(NamedTuple):
    """Where a limit ends a range.

    :param last: the last sequence within it; the first message is within every limit
    :param size: the bytes of the messages up to there
    """

    last: int
    size: int


def last_within(
    raw_options: Mapping[str, str], options: ReadOptions, info: StreamInfo, task: Range, limit: int
) -> BytesUpTo:
    """Find the last sequence of a range up to which messages have no more bytes than a limit.

    :param raw_options: the data source's options, from which connections are made
    :param limit: bytes of subjects, headers and bodies
    :raises TransientError: the server is away
    """
    sequences, sizes = _sizes(raw_options, options, info, task, limit)
    totals = np.cumsum(sizes)
    within = int(np.searchsorted(totals, limit, "right"))
    if within == len(totals):
        return BytesUpTo(task.last, int(totals[-1]) if within else 0)
    if within == 0:
        return BytesUpTo(int(sequences[0]), int(sizes[0]))
    # The sequences before the first message beyond the limit are a gap.
    return BytesUpTo(int(sequences[within]) - 1, int(totals[within - 1]))


def _sizes(
    raw_options: Mapping[str, str], options: ReadOptions, info: StreamInfo, task: Range, limit: int
) -> tuple[Integers, Integers]:
    """Read sequences and sizes in order, of each filter at least until its sizes exceed the limit."""
    settings = socket_settings(raw_options)
    most = options.fetch_batch or (CONSUMER_BATCH if task.method == "consumer" else DIRECT_BATCH)
    # Three pulls are on their way when the limit is found to be reached: few messages where the limit is small.
    options = options.model_copy(
        update={"fetch_batch": min(most, max(limit // info.limits.average_size, _FEWEST_MESSAGES))}
    )
    sequences, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    with closing(NatsSocket(settings)) as other:
        observed = SourceStream(other, options.stream)
        for subjects in scans(task):
            total = 0
            with closing(NatsSocket(settings)) as socket:
                stream = SourceStream(socket, options.stream)
                batches = fetch(
                    stream,
                    task,
                    subjects,
                    _COLUMNS,
                    options,
                    observed.next_sequence,
                    first=task.first,
                    pipelined=False,
                )
                with closing(batches):
                    for batch, _, _ in batches:
                        sequences.append(np.asarray(batch.column(_SEQUENCE)))
                        sizes.append(np.asarray(batch.column(SIZE)))
                        total += int(sizes[-1].sum())
                        if total > limit:
                            break
    every = np.concatenate(sequences)
    order = np.argsort(every, kind="stable")
    return every[order], np.concatenate(sizes)[order]


# As with Spark's Kafka source.
_MAX_DELAY = 15 * 60.0


class TriggerPace:
    """Divides a query's new messages into batches.

    :param raw_options: the data source's options, from which connections are made
    """

    def __init__(self, raw_options: Mapping[str, str]) -> None:
        self._raw_options = raw_options
        # When the last batch began; a query that has just started doesn't wait.
        self._last_batch: float | None = None

    def batch(self, streams: Sequence[NewMessages], limits: ReadOptions, *, may_wait: bool) -> list[NewMessages] | None:
        """Return what the next batch reads of each stream; ``None`` if it waits for more.

        A limit is divided among streams by how much there is of each, and lets at least one message of each pass, so
        that none of them waits forever.

        :param may_wait: whether there will be later triggers
        """
        if not any(new.pending for new in streams):
            return list(streams)
        found = [new.without_gap() for new in streams] if limits.given_limits else list(streams)
        total = sum(new.pending for new in found)
        if (
            may_wait
            and limits.min_offsets_per_trigger
            and total < limits.min_offsets_per_trigger
            and not self._is_due(limits.max_trigger_delay or _MAX_DELAY)
        ):
            return None
        self._last_batch = time.monotonic()
        if (most := limits.max_offsets_per_trigger) and total > most:
            found = [new.up_to(new.after + max(1, most * new.pending // total)) for new in found]
        return self._within_bytes(found, limits.max_bytes_per_trigger) if limits.max_bytes_per_trigger else found

    def _is_due(self, delay: float) -> bool:
        return self._last_batch is None or time.monotonic() - self._last_batch >= delay

    def _within_bytes(self, streams: Sequence[NewMessages], limit: int) -> list[NewMessages]:
        found = list(streams)
        weights = [new.estimated_bytes for new in streams]
        bytes_left, weight_left = limit, sum(weights)
        # Streams with more messages get the rest of a share that another stream doesn't use.
        for index in sorted((index for index, weight in enumerate(weights) if weight), key=weights.__getitem__):
            new, stream = found[index], found[index].stream
            share = max(1, bytes_left * weights[index] // weight_left)
            last, size = last_within(self._raw_options, stream.options, stream.info, new.range(), share)
            found[index] = new.up_to(last)
            bytes_left, weight_left = max(0, bytes_left - size), weight_left - weights[index]
        return found


_Result = TypeVar("_Result")


def stream_reader(
    raw_options: Mapping[str, str], schema: StructType, session: SessionDefaults = NO_SESSION
) -> DataSourceStreamReader:
    """Make the reader with all that this Spark supports: limits and AvailableNow since Spark 4.2.

    :raises SparkOptionError: an option needs a later Spark
    """
    if hasattr(streaming, "datasource"):
        return JetStreamLimitedStreamReader(raw_options, schema, session)
    if given := read_options(raw_options, "readStream", session).given_limits:
        raise SparkOptionError(f"{given[0]}: expected Spark 4.2 or later, found an earlier one: drop it")
    return JetStreamStreamReader(raw_options, schema, session)


@with_short_errors
class RefusedStreamReader(DataSourceStreamReader):
    """Raises an error of the options when the query begins.

    Spark stops the reader that it couldn't make, and its own UnboundLocalError for that hides the cause.
    """

    def __init__(self, error: JetStreamProviderError) -> None:
        self._error = error

    @override
    def initialOffset(self) -> dict[str, Any]:
        """Raise the error; a query with a checkpoint asks for this as well."""
        raise self._error

    @override
    def latestOffset(self, *_: object) -> dict[str, Any]:
        """Raise the error."""
        raise self._error

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Raise the error."""
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Raise the error."""
        raise self._error


@with_short_errors
class JetStreamStreamReader(DataSourceStreamReader):
    """Reads what was stored since the last batch; for Spark 4.1, which has no limits."""

    def __init__(
        self, raw_options: Mapping[str, str], schema: StructType, session: SessionDefaults = NO_SESSION
    ) -> None:
        self._raw_options = dict(raw_options)
        self._options = read_options(raw_options, "readStream", session)
        shared = self._options
        self._columns = RequestedColumns.of(
            schema, with_headers=shared.include_headers, decompress=shared.decompress, of_bucket=bool(shared.bucket)
        )
        self._socket: NatsSocket | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the connection out: the reader is pickled for the tasks."""
        return {**self.__dict__, "_socket": None}

    @override
    def initialOffset(self) -> dict[str, Any]:
        """Return the sequence before the first one that a new query reads, of each stream."""
        return write_offset(self._query(QueryStreams.initial))

    @override
    def latestOffset(  # type: ignore[override]
        self,
    ) -> dict[str, Any]:
        """Return the last sequence of each stream."""
        return self._end()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Divide the messages between two offsets among tasks."""
        return [RangePartition(task) for task in self._query(lambda streams: streams.plan(start, end))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one partition."""
        if isinstance(partition, RangePartition):
            task = partition.task
            yield from read_range(self._raw_options, self._options.of(task.stream), self._columns, task)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: Spark's checkpoint holds the offset, and messages stay in the stream."""

    def stop(self) -> None:
        """Close the connection."""
        if self._socket:
            self._socket.close()

    def _end(self) -> dict[str, Any]:
        return write_offset(self._query(QueryStreams.ends))

    def _query(self, function: Callable[[QueryStreams], _Result]) -> _Result:
        """Call a function over the open connection, or over a new one where that has broken since."""
        if self._socket:
            with suppress(TransientError):
                return function(QueryStreams(self._socket, self._options))
            self._socket.close()
        self._socket = NatsSocket(socket_settings(self._raw_options))
        return function(QueryStreams(self._socket, self._options))


if hasattr(streaming, "datasource"):
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadMaxBytes,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )

    @with_short_errors
    class JetStreamLimitedStreamReader(JetStreamStreamReader, SupportsTriggerAvailableNow):
        """A reader with limits, whose end is fixed where a query reads what is available now."""

        def __init__(
            self, raw_options: Mapping[str, str], schema: StructType, session: SessionDefaults = NO_SESSION
        ) -> None:
            super().__init__(raw_options, schema, session)
            self._target: dict[str, StreamPosition] | None = None
            self._pace = TriggerPace(self._raw_options)

        @override
        def latestOffset(  # type: ignore[override]
            self, start: dict[str, Any], limit: ReadLimit
        ) -> dict[str, Any]:
            """Return the last sequences of the next batch; the start where there is nothing new, or too little."""
            return self._query(lambda streams: self._limited_offset(streams, start, limit))

        @override
        def getDefaultReadLimit(self) -> ReadLimit:
            """Return one of the limits, which stands for all, or everything."""
            limits = self._options
            if limits.max_offsets_per_trigger:
                return ReadMaxRows(limits.max_offsets_per_trigger)
            if limits.max_bytes_per_trigger:
                return ReadMaxBytes(limits.max_bytes_per_trigger)
            few = limits.min_offsets_per_trigger
            return ReadMinRows(few) if few else ReadAllAvailable()

        @override
        def reportLatestOffset(self) -> dict[str, Any]:
            """Return the last sequence of each stream, for Spark's progress reports."""
            return self._end()

        @override
        def prepareForTriggerAvailableNow(self) -> None:
            """Fix the end of the query."""
            self._target = self._query(QueryStreams.ends)

        def _limited_offset(self, streams: QueryStreams, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
            new = streams.new_messages(start, self._target)
            # A query that ends after what is available now has no later trigger to wait for.
            batch = self._pace.batch(new, self._limits(limit), may_wait=self._target is None)
            return start if batch is None else streams.end_of(start, batch)

        def _limits(self, limit: ReadLimit) -> ReadOptions:
            """Return the options' limits, unless Spark wants everything or another limit."""
            if isinstance(limit, ReadAllAvailable):
                return self._options.unlimited()
            if isinstance(limit, ReadMaxRows):
                return self._options.model_copy(update={"max_offsets_per_trigger": limit.max_rows})
            return self._options
