"""A data source whose tasks fail once after all their rows are published; a module, so that tasks find it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark import TaskContext
from typing_extensions import override

from airflow_provider_jetstream.spark.source.data_source import JetStreamDataSource
from airflow_provider_jetstream.spark.source.writer import JetStreamWriter, WrittenRows

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from pyspark.sql.datasource import DataSourceWriter, WriterCommitMessage
    from pyspark.sql.types import StructType


class _FailingOnce(JetStreamWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        stored = super().write(iterator)
        context = TaskContext.get()
        assert context is not None
        assert isinstance(stored, WrittenRows)
        if context.attemptNumber() == 0:
            raise RuntimeError("published, and then failed")
        assert stored.duplicates == stored.rows
        return stored


class FailingDataSource(JetStreamDataSource):
    """The data source, with such a writer."""

    @classmethod
    def name(cls) -> str:
        """Give the name of the format."""
        return "failing"

    @override
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Make such a writer."""
        return _FailingOnce(self.options, schema, overwrite=overwrite)
