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
from airflow_provider_jetstream.spark.source.data_loss import Planned, record_matches
from airflow_provider_jetstream.spark.source.filter_pushdown import PushedBounds, push_down
from airflow_provider_jetstream.spark.source.latest_reader import read_latest
from airflow_provider_jetstream.spark.source.options import read_options
from airflow_provider_jetstream.spark.source.partition_planner import (
    LATEST,
    Range,
    fetch_method,
    first_sequence,
    last_sequence,
    narrow,
    plan_ranges,
    range_starts,
    require_latest,
)
from airflow_provider_jetstream.spark.source.partition_reader import read_range
from airflow_provider_jetstream.spark.source.source_stream import SourceStream, StreamInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql.datasource import Filter
    from pyspark.sql.types import StructType

    from airflow_provider_jetstream.spark.source.options import ReadOptions


@dataclass(frozen=True)
class StreamSnapshot:
    """A stream at the time of loading.

    :param version: the server's
    :param planned: what is stored, as far as a loss has to be told from something else later
    """

    info: StreamInfo
    version: tuple[int, ...]
    planned: Planned

    @classmethod
    def take(cls, raw_options: Mapping[str, str], options: ReadOptions) -> StreamSnapshot:
        """Read the stream's state from the server."""
        with closing(NatsSocket(socket_settings(raw_options))) as socket:
            return cls.of(SourceStream(socket, options.stream), options)

    @classmethod
    def of(cls, stream: SourceStream, options: ReadOptions) -> StreamSnapshot:
        """Read the state of a stream behind an open connection."""
        info = stream.info()
        starts = range_starts(max(info.first, options.start.sequence or 1), info.last, options)
        return cls(info, stream.socket.version, record_matches(stream, info, starts, options.filters))


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
            schema,
            with_headers=self._options.include_headers,
            decompress=self._options.decompress,
            of_bucket=self._options.of_bucket,
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
            snapshot = self._snapshot or StreamSnapshot.of(stream, options)
            info = snapshot.info
            if options.latest:
                require_latest(options, info)
                task = Range(1, info.last, LATEST, bounds.subjects or (), info.created, detect_loss=False)
                return [RangePartition(task)]
            method = fetch_method(options, info, snapshot.version)
            first = first_sequence(stream, options, info)
            first, last = narrow(stream, first, last_sequence(stream, options.end, info), info, bounds)
        tasks = plan_ranges(first, last, options, info, method, bounds.subjects or (), snapshot.planned)
        return [RangePartition(task) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one partition; Spark makes one up where there is none."""
        if not isinstance(partition, RangePartition):
            return
        if partition.task.method == LATEST:
            yield from read_latest(self._raw_options, self._options, self._columns, partition.task.subjects)
        else:
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
