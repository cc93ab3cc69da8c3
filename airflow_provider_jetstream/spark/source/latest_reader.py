"""Reads the last message of each subject: what a compacted stream or a key-value bucket holds now.

A message that is superseded before the consumer delivers it is delivered as its successor, so the read goes on until
nothing is left, and drops the successors of what it has already returned.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.source.fetch_consumer import ConsumerFetch
from airflow_provider_jetstream.spark.source.source_stream import SourceStream

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from airflow_provider_jetstream.spark.source.columns import RequestedColumns
    from airflow_provider_jetstream.spark.source.options import ReadOptions

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
    """Return the last message of each subject of which none was returned."""
    subjects = successors.column(_SUBJECT).combine_chunks()
    newest = {subject: row for row, subject in enumerate(subjects.to_pylist())}
    rows = pa.array(sorted(newest.values()), pa.int64())
    known = pc.is_in(subjects.take(rows), value_set=pa.chunked_array(returned, pa.string()).combine_chunks())
    missed: list[pa.RecordBatch] = successors.take(rows.filter(pc.invert(known))).combine_chunks().to_batches()
    return missed


def _without(batch: pa.RecordBatch, names: tuple[str, ...]) -> pa.RecordBatch:
    return batch.drop_columns(list(names)) if names else batch
