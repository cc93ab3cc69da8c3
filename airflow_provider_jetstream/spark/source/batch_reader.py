"""Reads streams once, as they were when they were loaded: ranges of sequences, or the last message of each subject."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceReader, InputPartition

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.errors import DataLossError, with_short_errors
from airflow_provider_jetstream.spark.source.columns import RequestedColumns
from airflow_provider_jetstream.spark.source.options import NO_SESSION, read_options
from airflow_provider_jetstream.spark.source.partition_planner import (
    LATEST,
    Range,
    fetch_method,
    first_sequence,
    last_sequence,
    plan_ranges,
    range_starts,
    record_matches,
    require_latest,
    with_share,
)
from airflow_provider_jetstream.spark.source.partition_reader import ConsumerFetch, read_range, require_same
from airflow_provider_jetstream.spark.source.source_stream import SourceStream, StreamInfo, names_of_streams

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyspark.sql.types import StructType

    from airflow_provider_jetstream.spark.source.options import ReadOptions, SessionDefaults

_SUBJECT, _SEQUENCE = "subject", "seq"


def read_latest(
    raw_options: Mapping[str, str], options: ReadOptions, columns: RequestedColumns, subjects: tuple[str, ...]
) -> Iterator[pa.RecordBatch]:
    """Read the last message of each subject, once each.

    Unlike a range it isn't continued after an interruption: Spark tries the task again.

    :param raw_options: the data source's options, from which the connection is made
    :param options: the same ones, parsed
    :param subjects: filters; empty for every subject
    :raises TransientError: the server was away
    """
    return columns.decoded(_read(raw_options, options, columns, subjects))


def _read(
    raw_options: Mapping[str, str], options: ReadOptions, columns: RequestedColumns, subjects: tuple[str, ...]
) -> Iterator[pa.RecordBatch]:
    added = tuple(name for name in (_SUBJECT, _SEQUENCE) if name not in columns)
    fetched = replace(columns, names=(*columns.names, *added), nullable=(*columns.nullable, *(True for _ in added)))
    settings = socket_settings(raw_options)
    returned: list[pa.Array] = []
    successors: list[pa.RecordBatch] = []
    with closing(NatsSocket(settings)) as socket, closing(NatsSocket(settings)) as other:
        stream, observed = SourceStream(socket, options.stream), SourceStream(other, options.stream)
        # Up to here the consumer delivers one message of each subject.
        last = stream.info().last
        fetch = ConsumerFetch(stream, subjects, fetched, options, observed.next_sequence)
        for batch, _, _ in fetch.fetch_latest():
            position = int(np.searchsorted(np.asarray(batch.column(_SEQUENCE)), last, "right"))
            if position:
                first = batch.slice(0, position)
                returned.append(first.column(_SUBJECT))
                yield _without(first, added)
            if position < batch.num_rows:
                successors.append(batch.slice(position))
    if successors:
        yield from (_without(batch, added) for batch in _missed(pa.Table.from_batches(successors), returned))


def _missed(successors: pa.Table, returned: list[pa.Array]) -> list[pa.RecordBatch]:
    """Return the last message of each subject that the consumer has left out."""
    subjects = successors.column(_SUBJECT).combine_chunks()
    newest = {subject: row for row, subject in enumerate(subjects.to_pylist())}
    rows = pa.array(sorted(newest.values()), pa.int64())
    known = pc.is_in(subjects.take(rows), value_set=pa.chunked_array(returned, pa.string()).combine_chunks())
    missed: list[pa.RecordBatch] = successors.take(rows.filter(pc.invert(known))).combine_chunks().to_batches()
    return missed


def _without(batch: pa.RecordBatch, names: tuple[str, ...]) -> pa.RecordBatch:
    return batch.drop_columns(list(names)) if names else batch


log = logging.getLogger(__name__)

# Streams that a log record names.
_SAID = 3


@dataclass(frozen=True)
class StreamSnapshot:
    """A stream at the time of loading.

    :param version: the server's
    """

    info: StreamInfo
    version: tuple[int, ...]


def take_snapshots(raw_options: Mapping[str, str], options: ReadOptions) -> dict[str, StreamSnapshot]:
    """Read the state of the streams that the options select, by their names.

    :raises NotFoundError: a stream that was named doesn't exist
    """
    with closing(NatsSocket(socket_settings(raw_options))) as socket:
        return _snapshots(socket, options)


def _snapshots(socket: NatsSocket, options: ReadOptions) -> dict[str, StreamSnapshot]:
    names = options.names or options.matching(names_of_streams(socket))
    return {name: StreamSnapshot(SourceStream(socket, name).info(), socket.version) for name in names}


def say_what_is_fixed(snapshots: Mapping[str, StreamSnapshot]) -> None:
    """Log where a batch ends for good: Spark plans it once, and refreshes no view that was made with USING."""
    if snapshots:
        ends = ", ".join(f"{name} to sequence {found.info.last}" for name, found in list(snapshots.items())[:_SAID])
        log.warning(
            "A batch reads %s%s at every action on this data frame or SQL view, also after REFRESH TABLE. For what is"
            " stored at each query load anew, or query a view of a table: CREATE TABLE t USING jetstream, then CREATE"
            " TEMPORARY VIEW v AS SELECT * FROM t WITH (stream '…', …). A streaming query reads on.",
            ends,
            " and so on" if len(snapshots) > _SAID else "",
        )


class RangePartition(InputPartition):
    """One task's range."""

    def __init__(self, task: Range) -> None:
        super().__init__(None)
        self.task = task


@with_short_errors
class JetStreamReader(DataSourceReader):
    """Reads the messages of a range of each stream.

    :param snapshots: from the time of loading; none where the user gave the schema and Spark didn't request it
    """

    def __init__(
        self,
        raw_options: Mapping[str, str],
        schema: StructType,
        snapshots: Mapping[str, StreamSnapshot] | None,
        session: SessionDefaults = NO_SESSION,
    ) -> None:
        self._raw_options = dict(raw_options)
        self._options = read_options(raw_options, "read", session)
        shared = self._options
        self._columns = RequestedColumns.of(
            schema, with_headers=shared.include_headers, decompress=shared.decompress, of_bucket=bool(shared.bucket)
        )
        self._snapshots = snapshots

    def partitions(self) -> Sequence[InputPartition]:
        """Divide the messages between tasks.

        :raises NotFoundError: no stream matches
        :raises SparkOptionError: bounds that name streams leave one out
        """
        with closing(NatsSocket(socket_settings(self._raw_options))) as socket:
            snapshots = _snapshots(socket, self._options) if self._snapshots is None else self._snapshots
            # Not when data is loaded: a streaming query is loaded in the same way, may wait for its streams, and needs
            # no bounds where it has a checkpoint.
            if not snapshots:
                raise NotFoundError(f"expected {self._options}, found none: check the option streamPattern")
            self._options.require_bounds(snapshots)
            if self._options.latest_per_subject:
                return [RangePartition(self._latest(name, snapshot)) for name, snapshot in snapshots.items()]
            ends = {name: self._ends(SourceStream(socket, name), snapshot) for name, snapshot in snapshots.items()}
            sizes = {name: max(0, last + 1 - first) for name, (first, last, _) in ends.items()}
            tasks: list[Range] = []
            for name, snapshot in snapshots.items():
                options, (first, last, info) = self._options.of(name), ends[name]
                options = with_share(options, sizes[name], sum(sizes.values()))
                method, starts = fetch_method(options, info, snapshot.version), range_starts(first, last, options)
                planned = record_matches(SourceStream(socket, name), info, starts, options.filter_subjects)
                tasks += plan_ranges(first, last, options, info, method, options.filter_subjects, planned)
        return [RangePartition(task) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one partition; Spark makes one up where there is none."""
        if not isinstance(partition, RangePartition):
            return
        task = partition.task
        options = self._options.of(task.stream)
        if task.method == LATEST:
            yield from read_latest(self._raw_options, options, self._columns, task.subjects)
            return
        try:
            yield from read_range(self._raw_options, options, self._columns, task)
        except DataLossError as error:
            problem = str(error)
        else:
            return
        raise DataLossError(
            f"{problem}; the first action fixed what is read: for what is stored now load it again, or query a view of"
            " a table in place of one made with USING"
        )

    def _latest(self, name: str, snapshot: StreamSnapshot) -> Range:
        """Return the whole stream as one task."""
        info = snapshot.info
        options = self._options.of(name)
        require_latest(options, info)
        return Range(name, 1, info.last, LATEST, options.filter_subjects, info.created, detect_loss=False)

    def _ends(self, stream: SourceStream, snapshot: StreamSnapshot) -> tuple[int, int, StreamInfo]:
        """Return the first and the last sequence to read of a stream, and its state now.

        What left the stream since the data was loaded isn't lost: nobody was to read it yet.

        :raises DataLossError: the stream was created anew since
        """
        options, info = self._options.of(stream.name), snapshot.info
        # Refused before anything is asked of the server.
        fetch_method(options, info, snapshot.version)
        first, last, now = (
            first_sequence(stream, options, info),
            last_sequence(stream, options.end, info),
            stream.info(),
        )
        require_same(stream, info.created, now)
        return max(first, now.first), last, now
