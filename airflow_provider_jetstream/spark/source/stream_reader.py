"""Reading a stream as it grows.

An offset is the last sequence that was read, so a batch is the same however often it runs.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from typing_extensions import override

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.jetstream.errors import TransientError
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.source.batch_reader import RangePartition
from airflow_provider_jetstream.spark.source.columns import Columns
from airflow_provider_jetstream.spark.source.options import read_options
from airflow_provider_jetstream.spark.source.partition_planner import (
    fetch_method,
    first_sequence,
    plan_ranges,
    report_loss,
)
from airflow_provider_jetstream.spark.source.partition_reader import read_range
from airflow_provider_jetstream.spark.source.stream_api import SourceStream, StreamInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql.types import StructType


_Result = TypeVar("_Result")


class JetStreamStreamReader(DataSourceStreamReader):
    """Reads what a stream has got since the last time; for Spark 4.1, which asks for no limits.

    :param given: the data source's options
    :param schema: the columns that are asked for
    """

    def __init__(self, given: Mapping[str, str], schema: StructType) -> None:
        self._given = dict(given)
        self._options = read_options(given, "readStream")
        self._columns = Columns.of(
            schema, with_headers=self._options.include_headers, decompress=self._options.decompress
        )
        self._wire: NatsSocket | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the connection behind: the reader goes to the tasks too.

        :return: what may go
        """
        return {**self.__dict__, "_wire": None}

    @override
    def initialOffset(self) -> dict[str, Any]:
        """Find where a new query begins.

        :return: the sequence before the first one to read
        """
        return self._ask(self._initial)

    @override
    def latestOffset(  # type: ignore[override]
        self,
    ) -> dict[str, Any]:
        """Find where the stream ends.

        :return: its last sequence
        """
        return self._ask(self._end)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Divide a batch between tasks.

        :param start: the last sequence of the batch before
        :param end: the last sequence of this one
        :return: a range for each task
        """
        return self._ask(lambda stream: self._partitions(stream, start, end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one range.

        :param partition: the range
        :return: batches
        """
        if isinstance(partition, RangePartition):
            yield from read_range(self._given, self._options, self._columns, partition.part)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: Spark's checkpoint holds the offset, and messages stay in the stream.

        :param end: the last sequence that was read
        """

    def stop(self) -> None:
        """Hang up."""
        if self._wire:
            self._wire.close()

    def _end(self, stream: SourceStream) -> dict[str, Any]:
        facts = stream.info()
        return _offset(facts, facts.last)

    def _initial(self, stream: SourceStream) -> dict[str, Any]:
        facts = stream.info()
        fail = self._options.fail_on_data_loss
        return _offset(facts, first_sequence(stream, self._options.start, facts, fail_on_data_loss=fail) - 1)

    def _partitions(self, stream: SourceStream, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        facts = stream.info()
        options = self._options
        first, last = self._begun(stream, start, facts) + 1, int(end["seq"])
        if end["created"] != facts.created:
            report_loss(
                f"{stream.name} was deleted and made anew after this batch was planned", fail=options.fail_on_data_loss
            )
            return []
        method = fetch_method(options, facts, stream.socket.version)
        parts = plan_ranges(first, last, options, facts, method, options.filters)
        return [RangePartition(part) for part in parts]

    def _begun(self, stream: SourceStream, start: dict[str, Any], facts: StreamInfo) -> int:
        """Give the last sequence that needn't be read again, having looked whether what follows is still there."""
        fail, seen = self._options.fail_on_data_loss, int(start["seq"])
        if start["created"] != facts.created:
            report_loss(f"{stream.name} was deleted and made anew after sequence {seen} was read", fail=fail)
            return facts.first - 1
        if seen > facts.last:
            report_loss(f"{stream.name} ends at {facts.last}, and {seen} was read", fail=fail)
        if facts.retention == "limits" and facts.first > seen + 1:
            report_loss(f"{stream.name} begins at {facts.first}, and {seen + 1} wasn't read", fail=fail)
        return max(seen, facts.first - 1)

    def _ask(self, question: Callable[[SourceStream], _Result]) -> _Result:
        """Ask over the connection that is held, which may have gone away since the last time."""
        if self._wire:
            with suppress(TransientError):
                return question(SourceStream(self._wire, self._options.stream, self._options.api_prefix))
            self._wire.close()
        self._wire = NatsSocket(socket_settings(self._given))
        return question(SourceStream(self._wire, self._options.stream, self._options.api_prefix))


def _offset(facts: StreamInfo, sequence: int) -> dict[str, Any]:
    return {"seq": sequence, "created": facts.created}
