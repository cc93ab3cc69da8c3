"""The data source ``jetstream``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import streaming
from pyspark.sql.datasource import DataSource, DataSourceStreamReader
from typing_extensions import override

from airflow_provider_jetstream.spark.errors import SparkOptionError
from airflow_provider_jetstream.spark.source.options import read_options

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

    from airflow_provider_jetstream.spark.source.batch_reader import StreamSnapshot


FORMAT = "jetstream"


class JetStreamDataSource(DataSource):
    """Reads and writes JetStream streams; registered by :func:`airflow_provider_jetstream.spark.register`.

    :param options: see ``docs/spark.md``
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._snapshot: StreamSnapshot | None = None

    @classmethod
    def name(cls) -> str:
        """Give the name of the format.

        :return: the name
        """
        return FORMAT

    def schema(self) -> str:
        """Give the columns of what is read, and fix which messages those are.

        Spark asks for it when data is loaded, and keeps this very object for every action on them.

        :return: the columns
        """
        from airflow_provider_jetstream.spark.source.batch_reader import StreamSnapshot
        from airflow_provider_jetstream.spark.source.columns import read_schema

        options = read_options(self.options, "load")
        self._snapshot = StreamSnapshot.now(self.options, options)
        return read_schema(with_headers=options.include_headers)

    @override
    def reader(self, schema: StructType) -> DataSourceReader:
        """Make a reader of what was there at loading.

        :param schema: the columns that are asked for
        :return: the reader
        """
        from airflow_provider_jetstream.spark.source.batch_reader import JetStreamFilteringReader, JetStreamReader

        kind = JetStreamFilteringReader if read_options(self.options, "read").push_filters else JetStreamReader
        return kind(self.options, schema, self._snapshot)

    @override
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Make a reader of what comes.

        :param schema: the columns that are asked for
        :return: the reader
        """
        return stream_reader(self.options, schema)

    @override
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Make a writer of rows that are there.

        :param schema: their columns
        :param overwrite: refused
        :return: the writer
        """
        from airflow_provider_jetstream.spark.source.writer import JetStreamWriter

        return JetStreamWriter(self.options, schema, overwrite=overwrite)

    @override
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Make a writer of rows that come.

        :param schema: their columns
        :param overwrite: refused
        :return: the writer
        """
        from airflow_provider_jetstream.spark.source.writer import JetStreamStreamWriter

        return JetStreamStreamWriter(self.options, schema, overwrite=overwrite)


def stream_reader(given: Mapping[str, str], schema: StructType) -> DataSourceStreamReader:
    """Make the reader that this Spark can use to the full.

    :param given: the data source's options
    :param schema: the columns that are asked for
    :return: a reader with limits and AvailableNow since Spark 4.2
    :raises SparkOptionError: an option needs a later Spark
    """
    if hasattr(streaming, "datasource"):
        from airflow_provider_jetstream.spark.source.limited_stream_reader import JetStreamLimitedStreamReader

        return JetStreamLimitedStreamReader(given, schema)
    from airflow_provider_jetstream.spark.source.stream_reader import JetStreamStreamReader

    if read_options(given, "readStream").max_per_trigger:
        raise SparkOptionError("maxOffsetsPerTrigger: expected Spark 4.2 or later, found an earlier one: drop it")
    return JetStreamStreamReader(given, schema)


def register(session: SparkSession) -> None:
    """Register the format ``jetstream`` with a session.

    :param session: on PySpark 4.1 or later
    """
    session.dataSource.register(JetStreamDataSource)
