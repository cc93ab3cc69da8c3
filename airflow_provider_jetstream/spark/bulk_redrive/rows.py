"""What tasks are handed: rows of the frame beside what the dead letter queue says about the same letters."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from airflow_provider_jetstream.jetstream.dead_letters.mentions import Kind, Mention
from airflow_provider_jetstream.spark.bulk_redrive.repairs import Row

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

TOLD = ("entries", "kinds", "consumers", "told_at", "deliveries")
# Before the names of columns that say what the dead letter queue says; a frame has columns of the same names.
TOLD_PREFIX = "told_"

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


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
            columns = {name: part.column(at).to_pylist() for at, name in enumerate(part.schema.names)}
            told = [columns.pop(TOLD_PREFIX + name) for name in TOLD]
            names = tuple(columns)
            yield [
                Work(Row.of(dict(zip(names, values, strict=True))), _mentions(*mentioned))
                for values, mentioned in zip(zip(*columns.values(), strict=True), zip(*told, strict=True), strict=True)
            ]


def _mentions(
    entries: list[int] | None,
    kinds: list[int] | None,
    consumers: list[str | None] | None,
    told_at: list[int] | None,
    deliveries: list[int] | None,
) -> tuple[Mention, ...]:
    if not entries:
        return ()
    told = zip(entries, kinds or (), consumers or (), told_at or (), deliveries or (), strict=True)
    return tuple(
        Mention(entry, Kind(kind), consumer, _EPOCH + timedelta(microseconds=moment), count)
        for entry, kind, consumer, moment, count in told
    )
