"""Reads a stream once, as it was when it was loaded."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition
from typing_extensions import override

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.source.columns import RequestedColumns
from airflow_provider_jetstream.spark.source.filter_pushdown import PushedBounds, push_down
from airflow_provider_jetstream.spark.source.options import read_options
from airflow_provider_jetstream.spark.source.partition_planner import (
    fetch_method,
    first_sequence,
    last_sequence,
    narrow,
    plan_ranges,
)
from airflow_provider_jetstream.spark.source.partition_reader import read_range
from airflow_provider_jetstream.spark.source.source_stream import SourceStream, StreamInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql.datasource import Filter
    from pyspark.sql.types import StructType

    from airflow_provider_jetstream.spark.source.options import ReadOptions
    from airflow_provider_jetstream.spark.source.partition_planner import Range


@dataclass(frozen=True)
class StreamSnapshot:
    """A stream at the time of loading.

    :param version: the server's
    """

    info: StreamInfo
    version: tuple[int, ...]

    @classmethod
    def take(cls, raw_options: Mapping[str, str], options: ReadOptions) -> StreamSnapshot:
        """Read the stream's state from the server."""
        with closing(NatsSocket(socket_settings(raw_options))) as socket:
            return cls(SourceStream(socket, options.stream).info(), socket.version)


class RangePartition(InputPartition):
    """One task's range."""

    def __init__(self, task: Range) -> None:
        super().__init__(None)
        self.task = task


class JetStreamReader(DataSourceReader):
    """Reads the messages of a range.

    :param snapshot: from the time of loading; none where the user gave the schema and Spark didn't request it
    """

    def __init__(self, raw_options: Mapping[str, str], schema: StructType, snapshot: StreamSnapshot | None) -> None:
        self._raw_options = dict(raw_options)
        self._options = read_options(raw_options, "read")
        self._columns = RequestedColumns.of(
            schema, with_headers=self._options.include_headers, decompress=self._options.decompress
        )
        self._snapshot = snapshot
        self._bounds = PushedBounds(subjects=self._options.filters or None)

    def partitions(self) -> Sequence[InputPartition]:
        """Divide the messages between tasks."""
        options, bounds = self._options, self._bounds
        if bounds.subjects == ():
            return []
        with closing(NatsSocket(socket_settings(self._raw_options))) as socket:
            stream = SourceStream(socket, options.stream)
            snapshot = self._snapshot or StreamSnapshot(stream.info(), socket.version)
            info = snapshot.info
            method = fetch_method(options, info, snapshot.version)
            first = first_sequence(stream, options.start, info, fail_on_data_loss=options.fail_on_data_loss)
            first, last = narrow(stream, first, last_sequence(stream, options.end, info), info, bounds)
        tasks = plan_ranges(first, last, options, info, method, bounds.subjects or ())
        return [RangePartition(task) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one partition; Spark makes one up where there is none."""
        if isinstance(partition, RangePartition):
            yield from read_range(self._raw_options, self._options, self._columns, partition.task)


class JetStreamFilteringReader(JetStreamReader):
    """A reader with filter pushdown.

    It is a class of its own because Spark refuses readers with ``pushFilters`` unless its configuration allows them.
    """

    @override
    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Narrow the read, and return all filters, so that Spark applies them again."""
        self._bounds = push_down(filters, self._options.filters)
        return filters
