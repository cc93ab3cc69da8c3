"""One task's read: on one connection, going on where it was when the connection breaks."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING

import pyarrow as pa

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.jetstream.errors import TransientError
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.errors import DataLossError
from airflow_provider_jetstream.spark.source.fetch_api import ApiFetch
from airflow_provider_jetstream.spark.source.fetch_consumer import ConsumerFetch
from airflow_provider_jetstream.spark.source.fetch_direct import DirectFetch
from airflow_provider_jetstream.spark.source.gap_detection import GapDetector
from airflow_provider_jetstream.spark.source.partition_planner import report_loss
from airflow_provider_jetstream.spark.source.stream_api import SourceStream

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from airflow_provider_jetstream.spark.source.columns import Columns
    from airflow_provider_jetstream.spark.source.gap_detection import Fetched
    from airflow_provider_jetstream.spark.source.options import ReadOptions
    from airflow_provider_jetstream.spark.source.partition_planner import Range

# Failures in a row, without a message between them, after which the task gives up and Spark decides; it does so too
# where they go on for longer than the connection's time limit.
_ATTEMPTS = 5
_PAUSE = 0.5
# What a task gives to Spark at a time. Larger batches have to be joined first, which is a copy, and fill the pipe to
# the JVM, so that neither side works while the other does.
_ROWS = 8192
_BYTES = 1 << 19


def read_range(
    given: Mapping[str, str], options: ReadOptions, columns: Columns, part: Range
) -> Iterator[pa.RecordBatch]:
    """Read a range.

    :param given: the data source's options, from which the connection is made
    :param options: the same ones, understood
    :param columns: what is asked for
    :param part: the range
    :return: batches
    :raises DataLossError: its messages are gone, and that is an error
    :raises TransientError: the server was away for too long
    """
    held: list[pa.RecordBatch] = []
    # A consumer takes all filters at once, a get takes one.
    scans = [part.subjects] if part.method == "consumer" else [(subject,) for subject in part.subjects or (">",)]
    for subjects in scans:
        for batch in _scan(given, options, columns, part, subjects):
            held.append(batch)
            if sum(each.num_rows for each in held) >= _ROWS or sum(each.nbytes for each in held) >= _BYTES:
                yield _joined(held)
                held.clear()
    if held:
        yield _joined(held)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _scan(
    given: Mapping[str, str], options: ReadOptions, columns: Columns, part: Range, subjects: tuple[str, ...]
) -> Iterator[pa.RecordBatch]:
    next_one, failures, broken = part.first, 0, 0.0
    settings = socket_settings(given)
    while next_one <= part.last:
        try:
            with closing(NatsSocket(settings)) as wire, GapDetector(given, options, part) as losses:
                stream = SourceStream(wire, options.stream, options.api_prefix)
                _require(stream, part, next_one)
                fetched = _fetched(stream, options, columns, part, subjects, next_one, bold=not failures)
                for batch, following, missing in fetched:
                    if missing is not None:
                        losses.look(missing)
                    next_one, failures = following, 0
                    if batch.num_rows:
                        yield batch
                if next_one <= part.last:
                    losses.look(next_one)
                return
        except TransientError:
            failures += 1
            broken = broken if failures > 1 else time.monotonic()
            if failures >= _ATTEMPTS or time.monotonic() - broken > settings.connection.timeout:
                raise
            time.sleep(_PAUSE * failures)


def _fetched(
    stream: SourceStream,
    options: ReadOptions,
    columns: Columns,
    part: Range,
    subjects: tuple[str, ...],
    first: int,
    *,
    bold: bool,
) -> Iterator[Fetched]:
    if part.method == "consumer":
        return ConsumerFetch(stream, subjects, columns, options).fetch(first, part.last)
    if part.method == "direct":
        return DirectFetch(stream, subjects[0], columns, options, bold=bold).fetch(first, part.last)
    return ApiFetch(stream, subjects[0], columns, options).fetch(first, part.last)


def _require(stream: SourceStream, part: Range, first: int) -> None:
    facts = stream.info()
    if facts.created != part.created:
        raise DataLossError(
            f"expected the stream {stream.name} that was created at {part.created}, found one created at"
            f" {facts.created}: it was deleted and made anew while it was read; read it again"
        )
    if facts.first > first and part.detect_loss:
        report_loss(f"{stream.name} begins at {facts.first} now, and {first} was to be read", fail=part.fail_on_loss)
