"""Writes a frame's rows to a stream, and keeps those that the stream doesn't take."""

from __future__ import annotations

import logging
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import pyarrow as pa
from pyspark.sql.types import StringType, StructField, StructType

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.source.publisher import Publisher
from airflow_provider_jetstream.spark.source.writer import (
    PartitionWriter,
    WriteIdentity,
    partition_number,
    row_slices,
    write_identity,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

_ADDED: Final = ("message_id", "reason")


def write_rows(rows: DataFrame, options: Mapping[str, str], quarantine: str) -> DataFrame:
    """Write rows as messages; those that can't be stored go into quarantine, each with the reason.

    A row goes there if it can't become a message, or if the server refuses it. A row whose fate isn't known, because
    the server went away, isn't put there: its task is tried again, and fails in the end.

    :param rows: with the columns of a write
    :param options: the same as those of the data source's writer
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
