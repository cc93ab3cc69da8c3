"""Writes rows to a stream: every row is acknowledged, or the task fails, or keeps the row in quarantine."""

from __future__ import annotations

import logging
import time
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StringType, StructField, StructType

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.errors import RowsNotStoredError, SparkOptionError, with_short_errors
from airflow_provider_jetstream.spark.source.options import write_options
from airflow_provider_jetstream.spark.source.publisher import Publisher
from airflow_provider_jetstream.spark.source.row_encoder import (
    SERVER_COLUMNS,
    RowEncoder,
    check_schema,
    require_settings,
)
from airflow_provider_jetstream.spark.source.source_stream import SourceStream

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pyspark.sql import DataFrame

    from airflow_provider_jetstream.spark.source.options import Purpose, WriteOptions
    from airflow_provider_jetstream.spark.source.source_stream import StreamInfo


log = logging.getLogger(__name__)

_QUERY = "sql.streaming.queryId"
_BATCH = "streaming.sql.batchId"
_ROWS = 2000
_BYTES = 4 << 20


@dataclass
class WrittenRows(WriterCommitMessage):
    """The rows that a task stored.

    :param rows: how many were acknowledged
    :param duplicates: how many of them the stream had already
    :param problem: which rows no attempt can store, and why; empty where there are none
    """

    rows: int
    duplicates: int
    problem: str = ""


class WriteIdentity(NamedTuple):
    """The common part of the ids that a write makes; the same write has it again.

    :param name: with which they begin
    :param secret: a key of their digests, without which nobody can compute one; empty where the user names the write
    """

    name: str
    secret: bytes = b""

    @classmethod
    def of_secret(cls, secret: str) -> WriteIdentity:
        """Make the identity of a write that nobody has named."""
        key = blake2b(secret.encode()).digest()
        # Ids are read by whoever may read the stream.
        return cls(blake2b(key, digest_size=8).hexdigest(), key)


class PartitionWriter:
    """Writes one partition, for all kinds of writes.

    :param purpose: whose options these are
    """

    def __init__(
        self, raw_options: Mapping[str, str], schema: StructType, purpose: Purpose, *, overwrite: bool
    ) -> None:
        self.raw_options = dict(raw_options)
        self.options: WriteOptions = write_options(raw_options, purpose)
        if overwrite:
            raise SparkOptionError('expected mode("append"), found overwrite: a stream can only be added to')
        check_schema(schema, self.options.subject)
        self._columns = schema.fieldNames()

    def require_stream(self, socket: NatsSocket) -> StreamInfo:
        """Return what is known of the stream.

        :raises SparkOptionError: the window is too short for a retried task, or the stream ignores a column
        """
        stream = SourceStream(socket, self.options.stream)
        info = stream.info()
        window = info.duplicate_window
        if any(SERVER_COLUMNS[name].needs for name in self._columns if name in SERVER_COLUMNS):
            config = stream.api(f"STREAM.INFO.{stream.name}")["config"]
            require_settings(self._columns, stream.name, config)
        if window < self.options.min_duplicate_window:
            raise SparkOptionError(
                f"expected a duplicate_window of at least {self.options.min_duplicate_window:g} s on"
                f" {self.options.stream}, found {window:g} s: a task that is retried later stores its rows twice;"
                " raise it, or accept that with minDuplicateWindow"
            )
        return info

    def write(self, identity: WriteIdentity, batches: Iterator[pa.RecordBatch]) -> WrittenRows:
        """Publish a partition.

        :param identity: of the write
        :return: also where rows can never be stored: a task that failed would be tried again, up to four times
        :raises RowsNotStoredError: some aren't known to be stored, and another attempt may store them
        """
        partition, start, problem = partition_number(), time.monotonic(), ""
        with closing(Publisher(self.raw_options, self.options, f"partition {partition}")) as publisher:
            info = self.require_stream(publisher.socket)
            encoder = self.encoder(identity, partition, info)
            try:
                for rows in row_slices(batches):
                    publisher.send(encoder.encode(rows))
                publisher.wait_for_all()
            except RowsNotStoredError as error:
                if error.may_pass:
                    raise
                problem = str(error)
        self.warn_if_late(partition, time.monotonic() - start, info.duplicate_window)
        return WrittenRows(publisher.stored, publisher.duplicates, problem)

    def encoder(self, identity: WriteIdentity, partition: int, info: StreamInfo) -> RowEncoder:
        """Return the encoder of a partition's rows."""
        return RowEncoder(
            self.options.stream,
            self.options.subject,
            f"{identity.name}:{partition}",
            secret=identity.secret,
            archived=info.limits.subjects if info.republishes else (),
            null_is_empty=self.options.null_value == "empty",
            drop_nats_headers=self.options.nats_headers == "drop",
        )

    def warn_if_late(self, partition: int, seconds: float, window: float) -> None:
        """Log that a retry of the task would have been too late for the stream's duplicate window."""
        if seconds > window:
            log.warning(
                "Partition %d took %.0f s, longer than the duplicate_window of %s (%.0f s): a retry would have stored"
                " its first rows twice. Raise the window, or write smaller partitions.",
                partition,
                seconds,
                self.options.stream,
                window,
            )


def partition_number() -> int:
    """Return the number of the task's partition, which all attempts of a task have in common."""
    context = TaskContext.get()
    return int(context.partitionId()) if context else 0


def write_identity(prefix: str | None) -> WriteIdentity:
    """Return the identity of a new write.

    :param prefix: its name, if the user gives it one
    """
    return WriteIdentity(prefix) if prefix else WriteIdentity.of_secret(uuid4().hex)


def batch_identity(prefix: str | None) -> WriteIdentity:
    """Return the identity of the task's query and batch; both outlive a restart of the query.

    :param prefix: replaces the query's id
    :raises SparkOptionError: Spark doesn't say which batch it is
    """
    context = TaskContext.get()
    query, batch = (context.getLocalProperty(name) if context else None for name in (_QUERY, _BATCH))
    if batch is None or (query := prefix or query) is None:
        raise SparkOptionError(
            f"expected the properties {_QUERY} and {_BATCH} in a task of a streaming query, found none: without them"
            " equal rows of two batches would be stored once; write from foreachBatch, with a msgIdPrefix made of the"
            " batch's number"
        )
    identity = WriteIdentity(prefix) if prefix else WriteIdentity.of_secret(query)
    return identity._replace(name=f"{identity.name}:{batch}")


def row_slices(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Divide batches: rows are copied while they are encoded, so few at a time where they are large."""
    for batch in batches:
        size = max(1, min(_ROWS, batch.num_rows * _BYTES // max(batch.nbytes, 1)))
        for first in range(0, batch.num_rows, size):
            yield batch.slice(first, size)


def _finish(stream: str, messages: list[WriterCommitMessage | None]) -> None:
    """Log how many rows were stored.

    :raises RowsNotStoredError: a task has named rows that can't be stored
    """
    written = [message for message in messages if isinstance(message, WrittenRows)]
    if problems := [message.problem for message in written if message.problem]:
        raise RowsNotStoredError("\n".join(problems), may_pass=False)
    log.info(
        "Stored %d rows in %s, %d of which it had already.",
        sum(message.rows for message in written),
        stream,
        sum(message.duplicates for message in written),
    )


@with_short_errors
class JetStreamWriter(DataSourceArrowWriter):
    """Writes the rows of a data frame; ``overwrite`` is refused."""

    def __init__(self, raw_options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        self._writer = PartitionWriter(raw_options, schema, "write", overwrite=overwrite)
        # Spark sends this very object to every attempt of every task.
        self._identity = write_identity(self._writer.options.msg_id_prefix)
        with closing(NatsSocket(socket_settings(raw_options))) as socket:
            self._writer.require_stream(socket)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Publish a partition."""
        return self._writer.write(self._identity, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Log how many rows were stored.

        :raises RowsNotStoredError: some can't be
        """
        _finish(self._writer.options.stream, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Do nothing: what is stored stays stored, and a later attempt is detected by its message ids."""


@with_short_errors
class JetStreamStreamWriter(DataSourceStreamArrowWriter):
    """Writes the batches of a streaming query; ``overwrite`` is refused."""

    def __init__(self, raw_options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        self._writer = PartitionWriter(raw_options, schema, "writeStream", overwrite=overwrite)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Publish a partition of a batch."""
        return self._writer.write(batch_identity(self._writer.options.msg_id_prefix), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batch: int) -> None:
        """Log how many rows were stored.

        :raises RowsNotStoredError: some can't be
        """
        _finish(self._writer.options.stream, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batch: int) -> None:
        """Do nothing: what is stored stays stored, and a later attempt is detected by its message ids."""


_ADDED: Final = ("message_id", "reason")


def write_rows(rows: DataFrame, options: Mapping[str, str], quarantine: str) -> DataFrame:
    """Write rows as messages; a row that can't be stored goes into quarantine, with the reason.

    A row goes there if it can't become a message, or if the server refuses it. A row whose fate isn't known, because
    the server went away, isn't put there: its task is tried again, and fails in the end.

    :param rows: with the columns of a write
    :param options: the options of the data source's writer
    :param quarantine: a directory that driver and executors share; each write adds a folder of its own to it
    :return: the rows of this write in quarantine: their own columns, ``message_id`` (with which they were to be stored)
        and ``reason``
    :raises SparkOptionError: an option, a column or the stream's configuration is invalid; nothing was stored
    """
    writer = PartitionWriter(options, rows.schema, "write", overwrite=False)
    # With a letter, or Spark might take the folder's name for a number.
    folder = f"w{uuid4().hex[:16]}"
    with closing(NatsSocket(socket_settings(options))) as socket:
        writer.require_stream(socket)
    task = _QuarantiningTask(writer, write_identity(writer.options.msg_id_prefix))

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return task.write(batches)

    schema = StructType([*rows.schema.fields, *(StructField(name, StringType()) for name in _ADDED)])
    # Nothing is replaced: the rows may come from this quarantine.
    path = f"{quarantine.rstrip('/')}/write={folder}"
    rows.mapInArrow(write, schema).write.mode("error").parquet(path)
    return rows.sparkSession.read.schema(schema).parquet(path)


@dataclass(frozen=True)
class _QuarantiningTask:
    writer: PartitionWriter
    identity: WriteIdentity

    def write(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Publish a partition, and return the rows that aren't stored.

        :raises RowsNotStoredError: of some rows it isn't known whether they are stored
        """
        partition, start = partition_number(), time.monotonic()
        refused: dict[int, tuple[str, str]] = {}
        # The rows that are neither stored nor refused, with the numbers of their first ones.
        held: list[tuple[int, pa.RecordBatch]] = []
        count = 0

        def take_refused() -> Iterator[pa.RecordBatch]:
            for first, rows in held:
                found = sorted(index for index in refused if first <= index < first + rows.num_rows)
                if found:
                    added = [refused.pop(index) for index in found]
                    yield _refused_rows(rows, [index - first for index in found], added)
            held[:] = [(first, rows) for first, rows in held if first + rows.num_rows > publisher.settled]

        name, options = f"partition {partition}", self.writer.options
        with closing(Publisher(self.writer.raw_options, options, name, refused)) as publisher:
            info = self.writer.require_stream(publisher.socket)
            encoder = self.writer.encoder(self.identity, partition, info)
            for rows in row_slices(batches):
                held.append((publisher.count, rows))
                publisher.send(encoder.encode(rows))
                for found in take_refused():
                    count += found.num_rows
                    yield found
            publisher.wait_for_all()
            for found in take_refused():
                count += found.num_rows
                yield found
        self.writer.warn_if_late(partition, time.monotonic() - start, info.duplicate_window)
        stored, duplicates = publisher.stored, publisher.duplicates
        log.info("Stored %d rows in %s, %d of which it had already", stored, options.stream, duplicates)
        if count:
            log.warning("%d rows of %s went into quarantine", count, name)


def _refused_rows(rows: pa.RecordBatch, indexes: list[int], added: list[tuple[str, str]]) -> pa.RecordBatch:
    taken = rows.take(pa.array(indexes, pa.int64()))
    columns = [*taken.columns, *(pa.array(column, pa.string()) for column in zip(*added, strict=True))]
    return pa.RecordBatch.from_arrays(columns, names=[*taken.schema.names, *_ADDED])
