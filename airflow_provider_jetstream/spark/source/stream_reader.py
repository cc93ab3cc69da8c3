"""Reads streams as they grow, in batches of bounded size where Spark supports that (4.2 and later).

An offset is the last sequence that was read of each stream, so a batch is the same however often it runs.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.sql import streaming
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from typing_extensions import override

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.jetstream.errors import TransientError
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.errors import SparkOptionError, with_short_errors
from airflow_provider_jetstream.spark.source.batch_reader import RangePartition
from airflow_provider_jetstream.spark.source.columns import RequestedColumns
from airflow_provider_jetstream.spark.source.options import NO_SESSION, read_options
from airflow_provider_jetstream.spark.source.partition_reader import read_range
from airflow_provider_jetstream.spark.source.query import QueryStreams, write_offset
from airflow_provider_jetstream.spark.source.trigger_pace import TriggerPace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql.streaming.datasource import ReadLimit
    from pyspark.sql.types import StructType

    from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
    from airflow_provider_jetstream.spark.source.options import ReadOptions, SessionDefaults
    from airflow_provider_jetstream.spark.source.query import StreamPosition

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
        return write_offset(self._options, self._query(QueryStreams.initial))

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
        return write_offset(self._options, self._query(QueryStreams.ends))

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
