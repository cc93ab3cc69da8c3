"""Reading a stream once, as it was when it was loaded."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition
from typing_extensions import override

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.source.columns import Columns
from airflow_provider_jetstream.spark.source.filter_pushdown import PushedBounds, push_down
from airflow_provider_jetstream.spark.source.options import read_options
from airflow_provider_jetstream.spark.source.partition_planner import (
    fetch_method,
    first_sequence,
    last_sequence,
    plan_ranges,
    within,
)
from airflow_provider_jetstream.spark.source.partition_reader import read_range
from airflow_provider_jetstream.spark.source.stream_api import SourceStream, StreamInfo

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

    :param facts: what it said of itself
    :param version: the server's
    """

    facts: StreamInfo
    version: tuple[int, ...]

    @classmethod
    def now(cls, given: Mapping[str, str], options: ReadOptions) -> StreamSnapshot:
        """Ask the stream.

        :param given: the data source's options
        :param options: the same ones, understood
        :return: what it is just now
        """
        with closing(NatsSocket(socket_settings(given))) as wire:
            return cls(SourceStream(wire, options.stream, options.api_prefix).info(), wire.version)


class RangePartition(InputPartition):
    """One task's range."""

    def __init__(self, part: Range) -> None:
        super().__init__(None)
        self.part = part


class JetStreamReader(DataSourceReader):
    """Reads the messages of a span.

    :param given: the data source's options
    :param schema: the columns that are asked for
    :param snapshot: from the time of loading; none where the user gave the schema, and Spark didn't ask for it
    """

    def __init__(self, given: Mapping[str, str], schema: StructType, snapshot: StreamSnapshot | None) -> None:
        self._given = dict(given)
        self._options = read_options(given, "read")
        self._columns = Columns.of(
            schema, with_headers=self._options.include_headers, decompress=self._options.decompress
        )
        self._snapshot = snapshot
        self._wanted = PushedBounds(subjects=self._options.filters or None)

    def partitions(self) -> Sequence[InputPartition]:
        """Divide the span between tasks.

        :return: a range for each
        """
        options, wanted = self._options, self._wanted
        if wanted.subjects == ():
            return []
        with closing(NatsSocket(socket_settings(self._given))) as wire:
            stream = SourceStream(wire, options.stream, options.api_prefix)
            snapshot = self._snapshot or StreamSnapshot(stream.info(), wire.version)
            facts = snapshot.facts
            method = fetch_method(options, facts, snapshot.version)
            first = first_sequence(stream, options.start, facts, fail_on_data_loss=options.fail_on_data_loss)
            first, last = within(stream, first, last_sequence(stream, options.end, facts), facts, wanted)
        return [
            RangePartition(part) for part in plan_ranges(first, last, options, facts, method, wanted.subjects or ())
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one range.

        :param partition: the range; Spark makes one up where there is none
        :return: batches
        """
        if isinstance(partition, RangePartition):
            yield from read_range(self._given, self._options, self._columns, partition.part)


class JetStreamFilteringReader(JetStreamReader):
    """The same, told by Spark what the query filters.

    A class of its own: Spark refuses readers that take filters wherever its configuration doesn't allow it.
    """

    @override
    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take what narrows the read.

        :param filters: all of which must hold
        :return: all of them, so that Spark checks them again
        """
        self._wanted = push_down(filters, self._options.filters)
        return filters
