"""Streaming queries without Spark: the reader is called as Spark calls it, batch by batch, with a checkpoint."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import LongType, StringType, StructField, StructType

from airflow_provider_jetstream.spark.source.stream_reader import stream_reader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SEQUENCE = StructType([StructField("seq", LongType())])
_PLACE = StructType([StructField("stream", StringType()), StructField("seq", LongType())])


class ReaderQuery:
    """A query of streams and sequences, which a test moves on.

    :ivar offset: the checkpoint
    """

    def __init__(self, stream_options: Mapping[str, str], **options: str) -> None:
        settings = {"startingOffsets": "earliest", **stream_options, **options}
        self.reader: Any = stream_reader(settings, _PLACE)
        self.offset = self.reader.initialOffset()

    def restart(self, stream_options: Mapping[str, str], **options: str) -> None:
        """Make the query anew from its checkpoint, with other options."""
        self.reader.stop()
        self.reader = stream_reader({**stream_options, **options}, _PLACE)

    def batch(self) -> list[int]:
        """Read the sequences of the next batch."""
        return list(sequences(self.reader, self._next()))

    def places(self) -> list[tuple[str, int]]:
        """Read the streams and sequences of the next batch."""
        return list(places(self.reader, self._next()))

    def _next(self) -> Any:
        start, self.offset = self.offset, self.reader.latestOffset(self.offset, self.reader.getDefaultReadLimit())
        # As Spark's checkpoint gives them back.
        return self.reader.partitions(*json.loads(json.dumps([start, self.offset])))

    def close(self) -> None:
        """Close the connection."""
        self.reader.stop()


def sequences(reader: Any, partitions: Any) -> Iterator[int]:
    """Read the sequences of some partitions."""
    for partition in partitions:
        for batch in reader.read(partition):
            yield from batch.column("seq").to_pylist()


def places(reader: Any, partitions: Any) -> Iterator[tuple[str, int]]:
    """Read the streams and sequences of some partitions."""
    for partition in partitions:
        for batch in reader.read(partition):
            yield from zip(batch.column("stream").to_pylist(), batch.column("seq").to_pylist(), strict=True)
