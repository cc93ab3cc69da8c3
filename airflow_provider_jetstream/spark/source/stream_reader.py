"""Reads a stream as it grows, in batches of bounded size where Spark supports that (4.2 and later).

An offset is the last sequence that was read, so a batch is the same however often it runs.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.sql import streaming
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from typing_extensions import override

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.jetstream.errors import TransientError
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.errors import SparkOptionError
from airflow_provider_jetstream.spark.source.batch_reader import RangePartition
from airflow_provider_jetstream.spark.source.columns import RequestedColumns
from airflow_provider_jetstream.spark.source.data_loss import find_loss, record_matches, report_loss
from airflow_provider_jetstream.spark.source.options import read_options
from airflow_provider_jetstream.spark.source.partition_planner import (
    fetch_method,
    first_sequence,
    plan_ranges,
    range_starts,
)
from airflow_provider_jetstream.spark.source.partition_reader import read_range
from airflow_provider_jetstream.spark.source.source_stream import SourceStream, StreamInfo, parse_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql.streaming.datasource import ReadLimit
    from pyspark.sql.types import StructType


log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


def stream_reader(raw_options: Mapping[str, str], schema: StructType) -> DataSourceStreamReader:
    """Make the reader with all that this Spark supports: limits and AvailableNow since Spark 4.2.

    :raises SparkOptionError: an option needs a later Spark
    """
    if hasattr(streaming, "datasource"):
        return JetStreamLimitedStreamReader(raw_options, schema)
    if read_options(raw_options, "readStream").max_per_trigger:
        raise SparkOptionError("maxOffsetsPerTrigger: expected Spark 4.2 or later, found an earlier one: drop it")
    return JetStreamStreamReader(raw_options, schema)


class JetStreamStreamReader(DataSourceStreamReader):
    """Reads what was stored since the last batch; for Spark 4.1, which has no limits."""

    def __init__(self, raw_options: Mapping[str, str], schema: StructType) -> None:
        self._raw_options = dict(raw_options)
        self._options = read_options(raw_options, "readStream")
        self._columns = RequestedColumns.of(
            schema,
            with_headers=self._options.include_headers,
            decompress=self._options.decompress,
            of_bucket=self._options.of_bucket,
        )
        self._socket: NatsSocket | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the connection out: the reader is pickled for the tasks."""
        return {**self.__dict__, "_socket": None}

    @override
    def initialOffset(self) -> dict[str, Any]:
        """Return the sequence before the first one that a new query reads."""
        return self._query(self._initial_offset)

    @override
    def latestOffset(  # type: ignore[override]
        self,
    ) -> dict[str, Any]:
        """Return the stream's last sequence."""
        return self._query(self._end_offset)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Divide the messages between two offsets among tasks."""
        return self._query(lambda stream: self._plan(stream, start, end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one partition."""
        if isinstance(partition, RangePartition):
            yield from read_range(self._raw_options, self._options, self._columns, partition.task)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: Spark's checkpoint holds the offset, and messages stay in the stream."""

    def stop(self) -> None:
        """Close the connection."""
        if self._socket:
            self._socket.close()

    def _end_offset(self, stream: SourceStream) -> dict[str, Any]:
        info = stream.info()
        return _offset(info, info.last)

    def _initial_offset(self, stream: SourceStream) -> dict[str, Any]:
        info = stream.info()
        return _offset(info, first_sequence(stream, self._options, info) - 1)

    def _plan(self, stream: SourceStream, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        info = stream.info()
        options = self._options
        first, last = self._last_read(stream, start, info) + 1, int(end["seq"])
        if end["created"] != info.created:
            report_loss(f"{stream.name} was deleted and recreated after this batch was planned", options)
            return []
        method = fetch_method(options, info, stream.socket.version)
        planned = record_matches(stream, info, range_starts(first, last, options), options.filters)
        tasks = plan_ranges(first, last, options, info, method, options.filters, planned)
        return [RangePartition(task) for task in tasks]

    def _last_read(self, stream: SourceStream, start: dict[str, Any], info: StreamInfo) -> int:
        """Return the last sequence that needn't be read again, and report a loss where what follows is gone."""
        options, last_read = self._options, int(start["seq"])
        if start["created"] != info.created:
            report_loss(f"{stream.name} was deleted and recreated after sequence {last_read} was read", options)
            return info.first - 1
        if last_read > info.last:
            self._require_past(stream, last_read, info)
            return info.last
        oldest = int(start.get("time", 0))
        if loss := find_loss(stream, info, last_read + 1, options.filters, oldest=oldest):
            report_loss(f"{stream.name} begins at {info.first}, and {last_read + 1} wasn't read", options, loss)
        return max(last_read, info.first - 1)

    def _require_past(self, stream: SourceStream, last_read: int, info: StreamInfo) -> None:
        """Refuse a checkpoint of another stream, or of one that was restored from an older state."""
        finding = f"the checkpoint is at {last_read}, and {stream.name} ends at {info.last}"
        if self._options.fail_on_data_loss:
            raise SparkOptionError(
                f"expected a checkpoint of this stream's past, found that {finding}: it was restored from a backup, or"
                " the checkpoint belongs to a stream of that name elsewhere; use another checkpoint, or set"
                f" failOnDataLoss to false to go on with what is stored after {info.last}"
            )
        log.warning("Going on after %d: %s.", info.last, finding)

    def _query(self, function: Callable[[SourceStream], _Result]) -> _Result:
        """Call a function over the open connection, or over a new one where that has broken since."""
        if self._socket:
            with suppress(TransientError):
                return function(SourceStream(self._socket, self._options.stream))
            self._socket.close()
        self._socket = NatsSocket(socket_settings(self._raw_options))
        return function(SourceStream(self._socket, self._options.stream))


def _offset(info: StreamInfo, sequence: int) -> dict[str, Any]:
    """Make an offset; its time tells later whether what was stored after it can have expired."""
    time = info.newest if sequence >= info.last else info.oldest
    return {"seq": sequence, "created": info.created, "time": time}


if hasattr(streaming, "datasource"):
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, SupportsTriggerAvailableNow

    class JetStreamLimitedStreamReader(JetStreamStreamReader, SupportsTriggerAvailableNow):
        """A reader with limits, whose end is fixed where a query reads what is available now."""

        _target: dict[str, Any] | None = None

        @override
        def latestOffset(  # type: ignore[override]
            self, start: dict[str, Any], limit: ReadLimit
        ) -> dict[str, Any]:
            """Return the last sequence of the next batch; the start where there is nothing new."""
            return self._query(lambda stream: self._limited_offset(stream, start, limit))

        @override
        def getDefaultReadLimit(self) -> ReadLimit:
            """Return the option ``maxOffsetsPerTrigger``, or everything."""
            limit = self._options.max_per_trigger
            return ReadMaxRows(limit) if limit else ReadAllAvailable()

        @override
        def reportLatestOffset(self) -> dict[str, Any]:
            """Return the stream's last sequence, for Spark's progress reports."""
            return self._query(self._end_offset)

        @override
        def prepareForTriggerAvailableNow(self) -> None:
            """Fix the end of the query."""
            self._target = self._query(self._end_offset)

        def _limited_offset(self, stream: SourceStream, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
            info = stream.info()
            end = self._end_offset(stream)
            if self._target and self._target["created"] == end["created"]:
                end = min(end, self._target, key=lambda offset: int(offset["seq"]))
            last_read = self._last_read(stream, start, info)
            if last_read >= end["seq"]:
                # Nothing new, unless the start means nothing here: the stream was recreated or restored.
                means_this = start["created"] == info.created and int(start["seq"]) <= info.last
                return start if means_this else {**end, "seq": last_read}
            if isinstance(limit, ReadMaxRows):
                # A limit counts sequences; gaps are skipped so that they don't make empty batches.
                message = stream.next_of(last_read + 1, self._options.filters)
                if message and message.sequence - 1 + limit.max_rows < end["seq"]:
                    end |= {"seq": message.sequence - 1 + limit.max_rows, "time": parse_time(message.time)}
            return end
