"""What tasks are handed: rows of the frame beside what the dead letter queue says about the same letters."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from airflow_provider_jetstream.spark.bulk_redrive.repairs import Row
from airflow_provider_jetstream.spark.dead_letters.told import mentions_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from airflow_provider_jetstream.jetstream.dead_letters.mentions import Mention

TOLD = ("entries", "kinds", "consumers", "told_at", "deliveries")
# Before the names of columns that say what the dead letter queue says; a frame has columns of the same names.
TOLD_PREFIX = "told_"


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
    for batch in batches:
        for start in range(0, batch.num_rows, size):
            part = batch.slice(start, size)
            told = [TOLD_PREFIX + name for name in TOLD]
            names = [name for name in part.schema.names if name not in told]
            values = zip(*(part.column(name).to_pylist() for name in names), strict=True)
            mentions = mentions_of([part.column(name) for name in told])
            yield [
                Work(Row.of(dict(zip(names, row, strict=True))), mentioned)
                for row, mentioned in zip(values, mentions, strict=True)
            ]
