"""Writing rows to a stream: every one acknowledged, or the task fails."""

from __future__ import annotations

import logging
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.errors import SparkOptionError
from airflow_provider_jetstream.spark.source.options import write_options
from airflow_provider_jetstream.spark.source.publisher import Publisher
from airflow_provider_jetstream.spark.source.row_encoder import RowEncoder, check_schema
from airflow_provider_jetstream.spark.source.stream_api import SourceStream

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from airflow_provider_jetstream.spark.source.options import Purpose, WriteOptions

log = logging.getLogger(__name__)

_QUERY = "sql.streaming.queryId"
_BATCH = "streaming.sql.batchId"
_ROWS = 2000
_BYTES = 4 << 20


@dataclass
class WrittenRows(WriterCommitMessage):
    """What became of a task's rows.

    :param rows: acknowledged rows
    :param duplicates: those of them that the stream had already
    """

    rows: int
    duplicates: int


class _Rows:
    """What both kinds of writer do with a partition.

    :param given: the data source's options
    :param schema: of the rows
    :param purpose: what the options are for
    :param overwrite: refused
    """

    def __init__(self, given: Mapping[str, str], schema: StructType, purpose: Purpose, *, overwrite: bool) -> None:
        self.given = dict(given)
        self.options: WriteOptions = write_options(given, purpose)
        if overwrite:
            raise SparkOptionError('expected mode("append"), found overwrite: a stream can only be added to')
        check_schema(schema, self.options.subject)

    def check(self, wire: NatsSocket) -> float:
        """Make sure that the stream is there and knows repeats for long enough.

        :param wire: an open connection
        :return: seconds for which it knows them
        :raises SparkOptionError: it forgets them too soon
        """
        window = SourceStream(wire, self.options.stream, self.options.api_prefix).info().duplicate_window
        if window < self.options.min_duplicate_window:
            raise SparkOptionError(
                f"expected a duplicate_window of at least {self.options.min_duplicate_window:g} s on"
                f" {self.options.stream}, found {window:g} s: a task that is tried again later stores its rows twice;"
                " raise it, or accept that with minDuplicateWindow"
            )
        return window

    def write(self, identity: str, batches: Iterator[pa.RecordBatch]) -> WrittenRows:
        """Publish a partition.

        :param identity: of the write
        :param batches: the rows
        :return: what became of them
        :raises RowsNotStoredError: some aren't known to be stored
        """
        context = TaskContext.get()
        partition = context.partitionId() if context else 0
        begun = time.monotonic()
        encoder = RowEncoder(self.options.stream, self.options.subject, f"{identity}:{partition}")
        with closing(Publisher(self.given, self.options, f"partition {partition}")) as publisher:
            window = self.check(publisher.wire)
            for batch in batches:
                # Rows are copied on their way: few at a time where they are large.
                together = max(1, min(_ROWS, batch.num_rows * _BYTES // max(batch.nbytes, 1)))
                for start in range(0, batch.num_rows, together):
                    publisher.send(encoder.encode(batch.slice(start, together)))
            publisher.settle()
        if (took := time.monotonic() - begun) > window:
            log.warning(
                "Partition %d took %.0f s, longer than the duplicate_window of %s (%.0f s): had it been tried again,"
                " its first rows would be stored twice. Raise the window, or write smaller partitions.",
                partition,
                took,
                self.options.stream,
                window,
            )
        return WrittenRows(publisher.stored, publisher.duplicates)


def _told(stream: str, messages: list[WriterCommitMessage | None]) -> None:
    stored = [message for message in messages if isinstance(message, WrittenRows)]
    log.info(
        "Stored %d rows in %s, %d of which it had already.",
        sum(message.rows for message in stored),
        stream,
        sum(message.duplicates for message in stored),
    )


class JetStreamWriter(DataSourceArrowWriter):
    """Writes the rows of a data frame.

    :param given: the data source's options
    :param schema: of the rows
    :param overwrite: refused
    """

    def __init__(self, given: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        self._rows = _Rows(given, schema, "write", overwrite=overwrite)
        # Spark sends this very object to every try of every task.
        self._identity = self._rows.options.prefix or uuid4().hex[:16]
        with closing(NatsSocket(socket_settings(given))) as wire:
            self._rows.check(wire)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Publish a partition.

        :param iterator: its rows
        :return: what became of them
        """
        return self._rows.write(self._identity, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Say how much was stored.

        :param messages: what became of each partition
        """
        _told(self._rows.options.stream, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Do nothing: what is stored stays stored, and a later try is known by its ids.

        :param messages: what became of each partition
        """


class JetStreamStreamWriter(DataSourceStreamArrowWriter):
    """Writes the batches of a streaming query.

    :param given: the data source's options
    :param schema: of the rows
    :param overwrite: refused
    """

    def __init__(self, given: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        self._rows = _Rows(given, schema, "writeStream", overwrite=overwrite)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Publish a partition of a batch.

        :param iterator: its rows
        :return: what became of them
        """
        context = TaskContext.get()
        # Both outlive a restart of the query, so that a batch that runs again makes the same ids.
        query = self._rows.options.prefix or (context.getLocalProperty(_QUERY) if context else None)
        batch = context.getLocalProperty(_BATCH) if context else None
        return self._rows.write(f"{query}:{batch}", iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batch: int) -> None:
        """Say how much was stored.

        :param messages: what became of each partition
        :param batch: its number
        """
        _told(self._rows.options.stream, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batch: int) -> None:
        """Do nothing: what is stored stays stored, and a later try is known by its ids.

        :param messages: what became of each partition
        :param batch: its number
        """
