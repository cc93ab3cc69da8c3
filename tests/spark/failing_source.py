"""A data source whose tasks fail once after they have published all rows; a module, so that tasks find it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark import TaskContext
from typing_extensions import override

from airflow_provider_jetstream.spark.source.writer import JetStreamWriter, WrittenRows
from testbed.spark_face import JetStreamDataSource

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from pyspark.sql.datasource import DataSourceWriter, WriterCommitMessage
    from pyspark.sql.types import StructType


class _FailingOnce(JetStreamWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        written = super().write(iterator)
        context = TaskContext.get()
        assert context is not None
        assert isinstance(written, WrittenRows)
        if context.attemptNumber() == 0:
            raise RuntimeError("failed after publishing")
        assert written.duplicates == written.rows
        return written


class FailingDataSource(JetStreamDataSource):
    """The data source with a writer that fails once per task."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "failing"

    @override
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Make a writer that fails once per task."""
        return _FailingOnce(self.options, schema, overwrite=overwrite)
