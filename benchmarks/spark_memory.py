"""A data source of Arrow batches from memory: the time that Spark itself takes for the columns of a message."""

from collections.abc import Iterator
from datetime import UTC, datetime

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

_ROWS = 10_000


class MemoryDataSource(DataSource):
    """Returns the requested number of messages, all from one batch that is made beforehand."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "memory"

    def schema(self) -> str:
        """Return the columns, those of the ``jetstream`` format."""
        return "value binary, subject string, stream string, seq bigint, timestamp timestamp"

    def reader(self, schema: StructType) -> DataSourceReader:
        """Create a reader."""
        return _Reader(int(self.options["messages"]), int(self.options["size"]))


class _Reader(DataSourceReader):
    def __init__(self, messages: int, size: int) -> None:
        self._messages, self._size = messages, size

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        columns = {
            "value": pa.array([b"x" * self._size] * _ROWS, pa.binary()),
            "subject": pa.array(["limits.a"] * _ROWS),
            "stream": pa.array(["limits"] * _ROWS),
            "seq": pa.array(range(_ROWS), pa.int64()),
            "timestamp": pa.array([datetime.now(UTC)] * _ROWS, pa.timestamp("us", "UTC")),
        }
        batch = pa.RecordBatch.from_pydict(columns)
        for start in range(0, self._messages, _ROWS):
            yield batch.slice(0, min(_ROWS, self._messages - start))
