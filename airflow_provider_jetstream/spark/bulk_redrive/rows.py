"""What tasks are handed: rows of the frame beside what the dead letter queue says about the same letters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_jetstream.spark.bulk_redrive.repairs import Row
from airflow_provider_jetstream.spark.dead_letters.columns import SEQUENCE
from airflow_provider_jetstream.spark.dead_letters.shares import unpacked
from airflow_provider_jetstream.spark.dead_letters.told import JOB_SCHEMA, mentions_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow_provider_jetstream.jetstream.dead_letters.mentions import Mention

# The column in which each task is told what the dead letter queue says about its letters, in a row before theirs.
TOLD: Final = "told"


class Work(NamedTuple):
    """A letter to be brought back.

    :param row: what the frame says
    :param mentions: what the dead letter queue says
    """

    row: Row
    mentions: tuple[Mention, ...]


def windows(batches: Iterator[pa.RecordBatch], size: int) -> Iterator[list[Work]]:
    """Take rows in the order in which they come.

    :param batches: of rows
    :param size: how many at a time
    :return: windows
    """
    told = pa.RecordBatch.from_pylist([], JOB_SCHEMA)
    for batch in batches:
        packed = batch.column(TOLD)
        if packed.null_count < len(packed):
            tables = [unpacked(value).read_all() for value in packed.drop_null()]
            (told,) = pa.concat_tables(tables).combine_chunks().to_batches()
        rows = batch.filter(packed.is_null()).drop_columns([TOLD])
        for start in range(0, rows.num_rows, size):
            part = rows.slice(start, size)
            values = zip(*(column.to_pylist() for column in part.columns), strict=True)
            mentions = _mentions(told, part.column(SEQUENCE))
            yield [
                Work(Row.of(dict(zip(part.schema.names, row, strict=True))), mentioned)
                for row, mentioned in zip(values, mentions, strict=True)
            ]


def _mentions(told: pa.RecordBatch, sequences: pa.Array) -> list[tuple[Mention, ...]]:
    """Look up what is said about letters; nothing about those that aren't there."""
    places = pc.index_in(sequences.cast(pa.int64()), told.column(SEQUENCE))
    return mentions_of([told.column(name).take(places) for name in JOB_SCHEMA.names[1:]])
