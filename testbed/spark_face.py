"""The data source without a JVM, for tests of what it plans, reads and writes, and the connection of a Spark task."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.connections import run_on_own_connection
from airflow_provider_jetstream.spark.source.columns import RequestedColumns
from airflow_provider_jetstream.spark.source.data_source import JetStreamDataSource
from airflow_provider_jetstream.spark.source.options import read_options, write_options
from airflow_provider_jetstream.spark.source.partition_planner import fetch_method, plan_ranges
from airflow_provider_jetstream.spark.source.partition_reader import read_range
from airflow_provider_jetstream.spark.source.publisher import Publisher
from airflow_provider_jetstream.spark.source.row_encoder import RowEncoder
from airflow_provider_jetstream.spark.source.source_stream import SourceStream

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa

__all__ = [
    "BlockingConnection",
    "JetStreamDataSource",
    "NatsSocket",
    "RowWriter",
    "SourceStream",
    "open_stream",
    "read_batches",
    "run_on_own_connection",
]


@contextmanager
def open_stream(options: Mapping[str, str]) -> Iterator[SourceStream]:
    """Open the stream that the data source's options name; it needn't exist."""
    socket = NatsSocket(socket_settings(options))
    try:
        yield SourceStream(socket, options["stream"])
    finally:
        socket.close()


def read_batches(
    options: Mapping[str, str], names: Sequence[str], first: int | None = None, last: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Read columns of a stream as tasks do, without Spark; each batch when it is asked for.

    :param first: the first sequence to read; by default the first that is stored
    :param last: the last sequence to read; by default the last that is stored
    """
    parsed = read_options(options, "read")
    with open_stream(options) as stream:
        info = stream.info()
        method = fetch_method(parsed, info, stream.socket.version)
    columns = RequestedColumns(tuple(names), (True,) * len(names), parsed.decompress)
    low, high = first or info.first, info.last if last is None else last
    for task in plan_ranges(low, high, parsed, info, method, parsed.filter_subjects):
        yield from read_range(options, parsed, columns, task)


class RowWriter:
    """Writes rows as one task does, without Spark.

    :param identity: what the ids of rows begin with that have none of their own
    :param task: how errors name the task
    :param refused: collects the rows that are refused for what they contain; without it they are an error
    """

    def __init__(
        self,
        options: Mapping[str, str],
        identity: str = "write:0",
        task: str = "partition 0",
        refused: dict[int, tuple[str, str]] | None = None,
    ) -> None:
        parsed = write_options(options, "write")
        self._encoder = RowEncoder(
            parsed.stream,
            parsed.subject,
            identity,
            null_is_empty=parsed.null_value == "empty",
            drop_nats_headers=parsed.nats_headers == "drop",
        )
        self._publisher = Publisher(options, parsed, task, refused)

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close its connection."""
        self._publisher.close()

    @property
    def stored(self) -> int:
        """How many rows are stored."""
        return self._publisher.stored

    @property
    def duplicates(self) -> int:
        """How many of them were stored before."""
        return self._publisher.duplicates

    def send(self, rows: pa.RecordBatch) -> None:
        """Send rows, and wait while too many are in flight."""
        self._publisher.send(self._encoder.encode(rows))

    def wait_for_all(self) -> None:
        """Wait until every row is stored or given up; raises where one isn't stored."""
        self._publisher.wait_for_all()
