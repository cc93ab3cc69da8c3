"""The data source ``jetstream``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from pyspark.sql.datasource import DataSource
from typing_extensions import override

from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.spark.connection_options import ConnectionPolicy
from airflow_provider_jetstream.spark.errors import with_short_errors
from airflow_provider_jetstream.spark.source.options import NO_SESSION, SessionDefaults, is_of_table, read_options

if TYPE_CHECKING:
    from collections.abc import MutableMapping

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


@with_short_errors
class JetStreamDataSource(DataSource):
    """Reads and writes JetStream streams; registered by :func:`airflow_provider_jetstream.spark.register`.

    Readers and writers are imported where they are made: Spark unpickles this class in processes that need neither.

    :param options: see ``docs/spark.md``
    """

    policy: ClassVar[ConnectionPolicy] = ConnectionPolicy()
    session: ClassVar[SessionDefaults] = NO_SESSION

    def __init__(self, options: MutableMapping[str, str]) -> None:
        # Every query comes through here; what runs later takes these options as they are.
        self.policy.check(options)
        super().__init__(options)
        self._snapshots: dict[str, StreamSnapshot] | None = None

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Return the columns of a read, and fix which messages are read.

        Spark calls it when data is loaded, and keeps this very object for every action on the data.
        """
        from airflow_provider_jetstream.spark.source.batch_reader import say_what_is_fixed, take_snapshots
        from airflow_provider_jetstream.spark.source.columns import read_schema

        options = read_options(self.options, "load", self.session)
        self._snapshots = take_snapshots(self.options, options)
        # A table's query is planned anew each time.
        if not is_of_table(self.options):
            say_what_is_fixed(self._snapshots)
        return read_schema(with_headers=options.include_headers, of_bucket=bool(options.bucket))

    @override
    def reader(self, schema: StructType) -> DataSourceReader:
        """Make a reader of what was stored when the data was loaded."""
        from airflow_provider_jetstream.spark.source.batch_reader import JetStreamReader

        return JetStreamReader(self.options, schema, self._snapshots, self.session)

    @override
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Make a reader of what is stored from now on."""
        from airflow_provider_jetstream.spark.source.stream_reader import RefusedStreamReader, stream_reader

        try:
            return stream_reader(self.options, schema, self.session)
        except JetStreamProviderError as error:
            return RefusedStreamReader(error)

    @override
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Make a writer of a data frame; ``overwrite`` is refused."""
        from airflow_provider_jetstream.spark.source.writer import JetStreamWriter

        return JetStreamWriter(self.options, schema, overwrite=overwrite)

    @override
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Make a writer of a streaming query; ``overwrite`` is refused."""
        from airflow_provider_jetstream.spark.source.writer import JetStreamStreamWriter

        return JetStreamStreamWriter(self.options, schema, overwrite=overwrite)


def register(session: SparkSession) -> None:
    """Register the format ``jetstream`` with a session.

    Its options choose only what the application's properties allow.

    :param session: on PySpark 4.1 or later
    :raises SparkOptionError: a property ``spark.jetstream.allowed…`` can't be used
    """
    allowed, defaults = ConnectionPolicy.of_session(session), _defaults_of(session)

    # A class of this function is sent to Spark's processes with its attributes, one of a module isn't.
    class _AllowedDataSource(JetStreamDataSource):
        policy, session = allowed, defaults

    session.dataSource.register(_AllowedDataSource)


def _defaults_of(session: SparkSession) -> SessionDefaults:
    """Return how many tasks run at a time, as the plan of a range has it, and the time zone; runs no job."""
    plan = str(session.sql("EXPLAIN SELECT * FROM range(1000000)").collect()[0][0])
    splits = re.search(r"splits=(?:Some\()?(\d+)", plan)
    return SessionDefaults(int(splits[1]) if splits else 1, str(session.conf.get("spark.sql.session.timeZone")))
